"""OVAL's own files of heads: what is written is read; what is not whole, or another base's, says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_heads import C, V, scatter_weights
from safetensors.torch import load_file, save_file

from oval_core.errors import ConfigError
from oval_spec.heads import BaseFacts, DraftHeads, DraftVocabulary, create_heads
from oval_spec.layouts import load_heads, save_heads
from oval_spec.layouts.own import CONFIG_NAME, WEIGHTS_NAME

BASE = BaseFacts(model_type="llama", hidden_size=C, vocab_size=V)
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("medusa", {"num_layers": 2, "has_bias": False}),
    ("medusa", {"own_lm_heads": 3}),
    ("sequential", {"mlp_size": 8, "num_cells": 2, "context": 2}),
    ("sequential", {"mlp_size": 8, "form": "prefix", "is_gated": True}),
]


def made(kind: str = "sequential", shape: dict[str, Any] | None = None) -> DraftHeads:
    vocabulary = DraftVocabulary(torch.tensor([9, 1, 30]), V)
    settings = {"num_heads": 2, "hidden_size": C} | ({"mlp_size": 8} if shape is None else shape)
    heads = create_heads(kind, settings, vocabulary)
    scatter_weights(heads)
    heads.accuracy = [[0.5, 0.25], [0.4, 0.125]]
    return heads


@pytest.mark.parametrize(("kind", "shape"), KINDS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@torch.no_grad()
def test_heads_go_there_and_back(
    tmp_path: Path, kind: str, shape: dict[str, Any], dtype: torch.dtype | None
) -> None:
    heads = made(kind, shape)
    save_heads(tmp_path / "new" / "heads", heads, BASE, training={"seed": 3}, dtype=dtype)
    again, report = load_heads(tmp_path / "new" / "heads", BASE)
    assert again.kind == kind
    assert again.dtype == (dtype or torch.float32)
    assert again.settings() == heads.settings()
    assert again.accuracy == heads.accuracy
    assert again.vocabulary is not None
    assert again.vocabulary.token_ids.tolist() == [9, 1, 30]
    for name, weight in again.state_dict().items():
        assert torch.equal(weight, heads.state_dict()[name].to(dtype or torch.float32))
    assert (report.layout, report.training) == ("oval", {"seed": 3})
    assert f"2 {kind} heads" in report.lines()[1]
    assert "drafts 3 tokens" in report.lines()[2]
    again.bind(torch.randn(V, C), torch.randn(V, C))
    hidden, path = torch.randn(4, C), torch.randn(4, again.context + 2, C)
    assert again.logits(again(hidden, path)[:, 1], 1).shape == (4, 3)


def test_heads_for_all_tokens_have_no_vocabulary(tmp_path: Path) -> None:
    heads = create_heads("medusa", {"num_heads": 1, "hidden_size": C})
    save_heads(tmp_path, heads, BASE)
    again, report = load_heads(tmp_path, BASE)
    assert (again.vocabulary, again.accuracy, report.num_draft_tokens) == (None, None, None)


def test_a_file_is_little_more_than_its_weights(tmp_path: Path) -> None:
    """The base's weights stay out, and shipped heads are a few MB."""
    vocabulary = DraftVocabulary(torch.arange(8192), 49152)
    heads = create_heads("sequential", {"num_heads": 4, "hidden_size": 576}, vocabulary)
    base = torch.zeros(1).expand(49152, 576)
    heads.bind(base, base)
    facts = BaseFacts(model_type="llama", hidden_size=576, vocab_size=49152)
    save_heads(tmp_path, heads, facts, dtype=torch.bfloat16)
    assert (tmp_path / WEIGHTS_NAME).stat().st_size < 7.2e6


def test_a_file_is_no_place_for_heads(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match="cannot be a folder"):
        save_heads(tmp_path / "file", made(), BASE)
    assert (tmp_path / "file").read_text() == "kept"


def test_saving_again_replaces(tmp_path: Path) -> None:
    save_heads(tmp_path, made(), BASE)
    other = made("medusa", {})
    save_heads(tmp_path, other, BASE)
    assert load_heads(tmp_path, BASE)[0].kind == "medusa"
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG_NAME, WEIGHTS_NAME]
    with pytest.raises(TypeError):  # what JSON cannot hold leaves the files as they were
        save_heads(tmp_path, made(), BASE, training={"x": object()})
    assert load_heads(tmp_path, BASE)[0].kind == "medusa"


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"hidden_size": 7}, "hidden size 6, and a model with hidden size 7"),
        ({"vocab_size": 41}, "vocabulary 40, and a model with vocabulary 41"),
        ({"model_type": "qwen3"}, "model family llama, and a model with model family qwen3"),
    ],
)
def test_another_base_is_refused(tmp_path: Path, other: dict[str, Any], says: str) -> None:
    save_heads(tmp_path, made(), BASE)
    facts = {"model_type": "llama", "hidden_size": C, "vocab_size": V} | other
    with pytest.raises(ConfigError, match=says):
        load_heads(tmp_path, BaseFacts(**facts))
    if "model_type" not in other:
        with pytest.raises(ConfigError, match="saving heads"):
            save_heads(tmp_path / "other", made(), BaseFacts(**facts))
        assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda v: v.update(format="oval-heads-0"), "got format 'oval-heads-0'"),
        (lambda v: v.pop("kind"), "kind"),
        (lambda v: v.update(kind="eagle"), "kind 'eagle'"),
        (lambda v: v["settings"].update(size=3), "size"),
        (lambda v: v["settings"].update(mlp_size=9), "size mismatch"),
        (lambda v: v["settings"].update(mlp_size=10**12), "size mismatch"),
        (lambda v: v["settings"].update(context=1), "Missing key"),
        (lambda v: v.update(settings=None), "do not make heads"),
        (lambda v: v["base"].pop("vocab_size"), "vocab_size"),
        (lambda v: v.update(accuracy=3), "not iterable"),
        (lambda v: v.update(accuracy=[[0.5]]), "for 2 heads"),
        (lambda v: v.update(accuracy=[[0.5], [1.5]]), "for 2 heads"),
        (lambda v: v.update(accuracy=[["a"]]), "could not convert"),
    ],
)
def test_a_config_that_is_not_the_weights_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    save_heads(tmp_path, made(), BASE)
    values = json.loads((tmp_path / CONFIG_NAME).read_text())
    change(values)
    (tmp_path / CONFIG_NAME).write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=says):
        load_heads(tmp_path, BASE)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    save_heads(tmp_path, made(), BASE)
    state = load_file(tmp_path / WEIGHTS_NAME)
    save_file(state | {"more": torch.ones(1)}, tmp_path / WEIGHTS_NAME)
    with pytest.raises(ConfigError, match="Unexpected key"):
        load_heads(tmp_path, BASE)
    broken = {name: weight / 0 for name, weight in state.items() if name != "token_map"}
    save_file(state | broken, tmp_path / WEIGHTS_NAME)
    with pytest.raises(ConfigError, match="not finite"):
        load_heads(tmp_path, BASE)
    save_file(state | {"token_map": torch.tensor([1, V])}, tmp_path / WEIGHTS_NAME)
    with pytest.raises(ConfigError, match=f"token {V}"):
        load_heads(tmp_path, BASE)
    (tmp_path / WEIGHTS_NAME).write_bytes(b"no")
    with pytest.raises(ConfigError, match="do not make heads"):
        load_heads(tmp_path, BASE)
    (tmp_path / WEIGHTS_NAME).unlink()
    with pytest.raises(ConfigError, match="do not make heads"):
        load_heads(tmp_path, BASE)
