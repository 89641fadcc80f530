"""Files that are not heads for this model: each is refused with its reason, never read into heads that accept nothing."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_heads import (
    C,
    V,
    make_parts,
    medusa_names,
    write_a,
    write_b,
    write_d,
    write_e,
    write_json,
)
from safetensors.torch import load_file, save_file

from oval_core.errors import ConfigError
from oval_spec.heads import BaseFacts
from oval_spec.layouts import load_heads

BASE = BaseFacts(model_type="llama", hidden_size=C, vocab_size=V)
LM_HEAD = torch.zeros(V, C)


def refused(folder: Path, base: BaseFacts = BASE) -> str:
    with pytest.raises(ConfigError) as caught:
        load_heads(folder, base)
    assert "Allowed: " in str(caught.value)
    return str(caught.value)


WRITERS: list[Callable[[Path], None]] = [
    lambda folder: write_a(folder, make_parts()),
    lambda folder: write_b(folder, make_parts()),
    lambda folder: write_b(folder, make_parts(own=False)),
    lambda folder: write_d(folder, make_parts()),
    lambda folder: write_e(folder, make_parts(), LM_HEAD),
    lambda folder: write_e(folder, make_parts(own=False), LM_HEAD),
]


@pytest.mark.parametrize("write", WRITERS)
def test_another_hidden_size(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    said = refused(tmp_path, BaseFacts(model_type="llama", hidden_size=8, vocab_size=V))
    assert "hidden size 8" in said


@pytest.mark.parametrize("write", [w for i, w in enumerate(WRITERS) if i != 2])
def test_another_vocabulary(tmp_path: Path, write: Callable[[Path], None]) -> None:
    """Layout C says nothing about its vocabulary, unless its config does."""
    write(tmp_path)
    said = refused(tmp_path, BaseFacts(model_type="llama", hidden_size=C, vocab_size=V + 1))
    assert f"vocabulary {V + 1}" in said or f"model with {V + 1} tokens" in said


def test_a_config_s_vocabulary_counts_where_keys_say_nothing(tmp_path: Path) -> None:
    write_b(tmp_path, make_parts(own=False), vocab_size=V + 5)
    assert f"vocabulary {V + 5}, and a model with vocabulary {V}" in refused(tmp_path)


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: write_d(folder, make_parts(), model_type="mistral"),
        lambda folder: write_b(folder, make_parts(), base_model_type="mistral"),
        lambda folder: write_e(folder, make_parts(), LM_HEAD, base_model_type="mistral"),
    ],
)
def test_another_family(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    assert "model family mistral, and a model with model family llama" in refused(tmp_path)
    load_heads(
        tmp_path, BaseFacts(model_type="", hidden_size=C, vocab_size=V)
    )  # not known: no reason


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s.pop("1.0.linear.weight"), "no layer 0 of head 1"),
        (lambda s: [s.pop(k) for k in list(s) if k.startswith("0.")], "no layer 0 of head 0"),
        (lambda s: s.pop("1.0.linear.bias"), r"a bias for some layers, not for all \(head 1"),
        (lambda s: s.pop("2.1.weight"), "LM heads that do not end every head (head 2)"),
        (lambda s: s.update({"0.5.linear.weight": torch.ones(C, C)}), "no layer 1 of head 0"),
        (lambda s: s.update({"9999.0.linear.weight": torch.ones(C, C)}), "no layer 0 of head 3"),
        (lambda s: s.update({"0.2.weight": torch.ones(V, C)}), "LM heads that do not end"),
        (lambda s: s.update({"0.0.linear.weight": torch.ones(C, 2 * C)}), "6x12"),
        (lambda s: s.update({"0.0.linear.bias": torch.ones(C, 1)}), "6x1"),
        (lambda s: s.update({"0.0.linear.bias": torch.ones(())}), "a number"),
        (lambda s: s.update({"0.1.weight": torch.ones(V)}), "0.1.weight of shape 40"),
        (lambda s: s.update({"1.1.weight": torch.ones(V - 1, C)}), "with 39 rows"),
        (lambda s: s["0.0.linear.weight"].fill_(torch.nan), "no finite floats"),
        (lambda s: s.update({"0.0.linear.weight": torch.ones(C, C).to(torch.int8)}), "int8"),
        (lambda s: s.clear() or s.update({"model.norm.weight": torch.ones(C)}), "model.norm.weight"),
    ],
)  # fmt: skip
def test_broken_heads(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    write_b(tmp_path, make_parts())
    state = load_file(tmp_path / "medusa_lm_head.safetensors")
    change(state)
    save_file(state, tmp_path / "medusa_lm_head.safetensors")
    assert says.replace("\\", "") in refused(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s, _: s.pop("lm_heads.1.weight"), "do not end every head (head 1)"),
        (lambda s, _: s.pop("blocks.1.layers.0.weight"), "no layer 0 of head 1"),
        (lambda s, _: [s.pop(f"lm_heads.{k}.weight") for k in range(3)], "no lm_head.weight"),
        (lambda s, _: s.update({"lm_head.weight": LM_HEAD.clone()}), "both lm_head.weight and"),
        (lambda _, c: c.update({"truncated_vocab_size": 3}), "without token_map"),
        (lambda s, _: s.update({"token_map": torch.tensor([1, 1])}), "token 1 more than once"),
        (lambda s, _: s.update({"token_map": torch.tensor([V])}), f"token {V}"),
    ],
)
def test_broken_vllm_heads(tmp_path: Path, change: Callable[..., object], says: str) -> None:
    write_e(tmp_path, make_parts(), LM_HEAD)
    state = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    change(state, config)
    save_file(state, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", config)
    assert says in refused(tmp_path)


@pytest.mark.parametrize("sign", ["config", "file", "key"])
def test_hydra_heads_are_refused_by_name(tmp_path: Path, sign: str) -> None:
    write_b(tmp_path, make_parts(), **({"hydra_num_heads": 4} if sign == "config" else {}))
    if sign == "file":
        shutil.move(tmp_path / "medusa_lm_head.safetensors", tmp_path / "hydra_lm_head.safetensors")
    if sign == "key":
        save_file({"hydra_head.0.weight": torch.ones(2)}, tmp_path / "medusa_lm_head.safetensors")
    assert "Hydra heads" in refused(tmp_path)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "a/../b", "..\\b", "", ".", "..", 3, None]
)
def test_an_index_that_leads_elsewhere(tmp_path: Path, name: object) -> None:
    folder = tmp_path / "heads"
    write_d(folder, make_parts())
    outside = folder / "model-00002-of-00003.safetensors"
    shutil.copy(outside, tmp_path / "secret.safetensors")
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["medusa_head.0.0.linear.weight"] = name
    index.write_text(json.dumps(values))
    assert "files in that folder that end in .safetensors" in refused(folder)


def test_an_index_whose_files_lack_its_keys(tmp_path: Path) -> None:
    write_d(tmp_path, make_parts())
    shard = tmp_path / "model-00002-of-00003.safetensors"
    save_file({"other": torch.ones(1)}, shard)
    assert "with the keys of its index" in refused(tmp_path)
    shard.unlink()
    assert "model-00002-of-00003.safetensors cannot be read" in refused(tmp_path)
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": {}})
    assert "no weight_map" in refused(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert "got list" in refused(tmp_path)


class Payload:
    """What a hostile pickle does: a call while it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickle_cannot_run_code(tmp_path: Path, is_zip: bool) -> None:
    folder, ran = tmp_path / "heads", tmp_path / "ran"
    write_a(folder, make_parts())
    path = folder / "medusa_lm_head.pt"
    harmful: dict[str, Any] = medusa_names(make_parts()) | {"x": Payload(ran)}
    torch.save(harmful, path, _use_new_zipfile_serialization=is_zip)
    assert "weights_only=True" in refused(folder)
    path.write_bytes(pickle.dumps(Payload(ran), protocol=2))
    assert "weights_only=True" in refused(folder)
    assert not ran.exists()
    pickle.loads(path.read_bytes())
    assert ran.exists()  # it would have


def test_older_torch_files_are_read(tmp_path: Path) -> None:
    write_a(tmp_path, make_parts())
    state = medusa_names(make_parts())
    torch.save(state, tmp_path / "medusa_lm_head.pt", _use_new_zipfile_serialization=False)
    assert load_heads(tmp_path, BASE)[1].layout == "A"


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("content", [b"", b"nonsense", None])
def test_damaged_files(tmp_path: Path, name: str, content: bytes | None) -> None:
    (write_a if name.endswith(".pt") else write_b)(tmp_path, make_parts())
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    assert str(path) in refused(tmp_path)


@pytest.mark.parametrize("values", [[torch.ones(1)], {"0.0.linear.weight": 3}, {0: torch.ones(1)}])
def test_torch_files_that_are_no_state_dict(tmp_path: Path, values: object) -> None:
    torch.save(values, tmp_path / "medusa_lm_head.pt")
    assert "no state dict" in refused(tmp_path)


def test_folders_without_heads(tmp_path: Path) -> None:
    assert "no such folder" in refused(tmp_path / "none")
    assert "no weight files" in refused(tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        save_file(medusa_names(make_parts()), tmp_path / name)
    assert "a.safetensors, b.safetensors" in refused(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    assert load_heads(tmp_path, BASE)[1].layout == "B"
    (tmp_path / "config.json").write_text("{")
    assert "config.json cannot be read" in refused(tmp_path)
