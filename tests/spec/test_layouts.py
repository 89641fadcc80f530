"""Medusa layouts A to E: what upstream writes is read to the same logits, and the report says what was found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_heads import (
    C,
    MedusaParts,
    V,
    make_parts,
    medusa_logits,
    medusa_names,
    vllm_logits,
    write_a,
    write_b,
    write_d,
    write_e,
)
from safetensors.torch import load_file, save_file

from oval_core.errors import ConfigError
from oval_spec.heads import BaseFacts, DraftHeads, DraftVocabulary, MedusaHeads, create_heads
from oval_spec.layouts import load_heads, write_tgi, write_vllm

BASE = BaseFacts(model_type="llama", hidden_size=C, vocab_size=V)
LM_HEAD = torch.linspace(-2, 3, V * C).sin().view(V, C)
HIDDEN = torch.linspace(-1, 2, 4 * C).cos().view(4, C)


@torch.no_grad()
def logits_of(heads: DraftHeads) -> torch.Tensor:
    heads.bind(torch.zeros(V, C), LM_HEAD)
    states = heads(HIDDEN, torch.zeros(len(HIDDEN), heads.num_heads, C))
    return torch.stack([heads.logits(states[:, k], k) for k in range(heads.num_heads)], 1)


def write_e_shared(folder: Path, parts: MedusaParts) -> None:
    write_e(folder, parts, LM_HEAD)


def write_e_prefixed(folder: Path, parts: MedusaParts) -> None:
    write_e(folder, parts, LM_HEAD, prefix="medusa_heads.")


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize(
    ("letter", "write", "own", "bias"),
    [
        ("A", write_a, True, True),
        ("B", write_b, True, True),
        ("C", write_b, False, True),
        ("C", write_a, False, True),
        ("D", write_d, True, True),
        ("D", write_d, False, True),
        ("E", write_e_shared, False, False),
        ("E", write_e_shared, True, True),
        ("E", write_e_prefixed, True, False),
        ("E", write_e_prefixed, False, True),
    ],
)
def test_a_layout_is_read(
    tmp_path: Path,
    num_layers: int,
    letter: str,
    write: Callable[[Path, MedusaParts], None],
    own: bool,
    bias: bool,
) -> None:
    parts = make_parts(3, num_layers, own=own, bias=bias)
    write(tmp_path, parts)
    heads, report = load_heads(tmp_path, BASE)
    torch.testing.assert_close(logits_of(heads), medusa_logits(parts, HIDDEN, LM_HEAD))
    assert (report.layout, report.num_heads, report.num_layers) == (letter, 3, num_layers)
    assert (report.has_own_lm_heads, report.has_bias) == (own, bias)
    assert report.contradictions == ()
    assert not heads.training
    text = "\n".join(report.lines())
    assert f"layout {letter}: " in text
    assert f"3 medusa heads, {num_layers} layers each, {'with' if bias else 'no'} bias" in text
    assert ("one a head" in text) == own


def test_a_merged_model_is_read_without_its_base(tmp_path: Path) -> None:
    write_d(tmp_path, make_parts())
    (tmp_path / "model-00001-of-00003.safetensors").unlink()  # holds the base alone
    _, report = load_heads(tmp_path, BASE)
    assert report.files == tuple(f"model-0000{i}-of-00003.safetensors" for i in (2, 3))
    assert report.ignored == ("lm_head.weight", "model.embed_tokens.weight")
    assert "ignored 2 keys: lm_head.weight, model.embed_tokens.weight" in report.lines()
    assert any("fit that base" in note for note in report.notes)


def test_a_merged_multimodal_model_says_its_decoder(tmp_path: Path) -> None:
    text = {"model_type": "llama", "hidden_size": C, "vocab_size": V}
    write_d(tmp_path, make_parts(), model_type="llava", hidden_size=None, text_config=text)
    assert load_heads(tmp_path, BASE)[1].layout == "D"


def test_tied_layers_are_read_as_equal_ones(tmp_path: Path) -> None:
    """Upstream's `[ResBlock(H)] * L` saves one layer L times; torch files then share its memory."""
    parts = make_parts(2, 1)
    parts.layers = [layers * 3 for layers in parts.layers]
    write_a(tmp_path, parts)
    shared = medusa_names(parts)
    for k in range(2):
        for n in range(1, 3):
            for part in ("weight", "bias"):
                shared[f"{k}.{n}.linear.{part}"] = shared[f"{k}.0.linear.{part}"]
    torch.save(shared, tmp_path / "medusa_lm_head.pt")
    heads, report = load_heads(tmp_path, BASE)
    torch.testing.assert_close(logits_of(heads), medusa_logits(parts, HIDDEN, LM_HEAD))
    assert any("one layer, saved many times" in note for note in report.notes)
    write_b(tmp_path, make_parts(2, 3))  # three layers of their own
    assert load_heads(tmp_path, BASE)[1].notes == ()


def test_keys_are_believed_against_the_config(tmp_path: Path) -> None:
    """Upstream's v1.3 configs say 2 heads where the files have 5."""
    write_a(tmp_path, make_parts(5), medusa_num_heads=2)
    heads, report = load_heads(tmp_path, BASE)
    assert heads.num_heads == 5
    assert report.contradictions == (
        "medusa_num_heads: config says 2, keys say 5; the keys are used",
    )
    assert "but medusa_num_heads: config says 2, keys say 5; the keys are used" in report.lines()
    assert report.said["base_model_name_or_path"] == "some/base"


def test_a_config_is_not_needed(tmp_path: Path) -> None:
    write_b(tmp_path, make_parts(own=False))
    (tmp_path / "config.json").unlink()
    _, report = load_heads(tmp_path, BASE)
    assert report.layout == "C"
    assert "config says: nothing about heads" in report.lines()


def test_unknown_keys_are_reported(tmp_path: Path) -> None:
    state = medusa_names(make_parts()) | {"0.0.norm.weight": torch.ones(C)}
    state |= {f"extra.{i}": torch.ones(1) for i in range(11)}
    save_file(state, tmp_path / "medusa_lm_head.safetensors")
    _, report = load_heads(tmp_path, BASE)
    assert len(report.ignored) == 12
    assert report.lines()[-1].startswith("ignored 12 keys: 0.0.norm.weight, extra.0, ")
    assert report.lines()[-1].endswith(" and 4 more")


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("rows", [3, V])
def test_vllm_s_truncated_vocabulary_is_read(tmp_path: Path, own: bool, rows: int) -> None:
    """LM heads have the rows of the draft vocabulary, or all, of which vLLM then takes those."""
    ids = torch.tensor([30, 2, 11])
    parts = make_parts(2, own=own, rows=rows)
    parts.token_map = ids
    write_e(tmp_path, parts, LM_HEAD if rows == V else LM_HEAD[ids])
    heads, report = load_heads(tmp_path, BASE)
    assert heads.vocabulary is not None
    assert heads.vocabulary.token_ids.tolist() == [30, 2, 11]
    wide = medusa_logits(parts, HIDDEN, LM_HEAD)
    expected = wide[..., ids] if wide.shape[-1] == V else wide
    torch.testing.assert_close(logits_of(heads), expected)
    assert report.num_draft_tokens == 3
    assert report.contradictions == ()
    assert any("drafts 3 tokens" in line for line in report.lines())


def test_vllm_s_first_lm_head_serves_all_where_it_is_alone(tmp_path: Path) -> None:
    parts = make_parts(3, own=False)
    write_e(tmp_path, parts, LM_HEAD)
    state = load_file(tmp_path / "model.safetensors")
    state["lm_heads.0.weight"] = state.pop("lm_head.weight")
    save_file(state, tmp_path / "model.safetensors")
    heads, report = load_heads(tmp_path, BASE)
    assert not report.has_own_lm_heads
    torch.testing.assert_close(logits_of(heads), medusa_logits(parts, HIDDEN, LM_HEAD))


def trained(**shape: Any) -> MedusaHeads:
    heads = create_heads("medusa", {"num_heads": 3, "hidden_size": C} | shape)
    assert isinstance(heads, MedusaHeads)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.copy_(torch.randn_like(weight))
    return heads.eval()


def test_tgi_heads_go_there_and_back(tmp_path: Path) -> None:
    heads = trained()
    write_tgi(tmp_path, heads, BASE, base_name="some/base")
    again, report = load_heads(tmp_path, BASE)
    assert torch.equal(logits_of(again), logits_of(heads))
    assert report.layout == "C"
    assert (report.contradictions, report.ignored) == ((), ())
    # What TGI opens, by its own loader's names.
    state = load_file(tmp_path / "medusa_lm_head.safetensors")
    assert set(state) == {f"{k}.0.linear.{p}" for k in range(3) for p in ("weight", "bias")}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["medusa_num_layers"] == 1
    assert config["base_model_name_or_path"] == "some/base"


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("ids", [None, [30, 2, 11]])
def test_vllm_heads_go_there_and_back(
    tmp_path: Path, num_layers: int, bias: bool, own: bool, ids: list[int] | None
) -> None:
    rows = 0 if not own else V if ids is None else len(ids)
    heads = trained(num_layers=num_layers, has_bias=bias, own_lm_heads=rows)
    heads.vocabulary = None if ids is None else DraftVocabulary(torch.tensor(ids), V)
    expected = logits_of(heads)
    write_vllm(tmp_path, heads, BASE)
    again, report = load_heads(tmp_path, BASE)
    assert torch.equal(logits_of(again), expected)
    assert report.layout == "E"
    assert (report.contradictions, report.ignored) == ((), ())
    state = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    counts = [key for key in config if "num" in key and ("heads" in key or "layers" in key)]
    assert sorted(counts) == ["num_heads", "num_hidden_layers"]  # vLLM renames any other to these
    served = vllm_logits(state, config, HIDDEN)
    torch.testing.assert_close(served if ids is None else served[..., ids], expected)
    assert ids is None or served.isneginf().sum() == 4 * 3 * (V - 3)


def test_heads_that_others_cannot_serve_are_not_written(tmp_path: Path) -> None:
    sequential = create_heads("sequential", {"num_heads": 2, "hidden_size": C})
    for write in (write_vllm, write_tgi):
        named = {"base_name": "x"} if write is write_tgi else {}
        with pytest.raises(ConfigError, match="sequential heads. Allowed: medusa heads"):
            write(tmp_path, sequential, BASE, **named)
        with pytest.raises(ConfigError, match="hidden size 6 and facts"):
            write(
                tmp_path, trained(), BaseFacts(model_type="", hidden_size=7, vocab_size=V), **named
            )
    for shape in ({"num_layers": 2}, {"has_bias": False}, {"own_lm_heads": V}):
        with pytest.raises(ConfigError, match="one layer with a bias"):
            write_tgi(tmp_path, trained(**shape), BASE, base_name="x")
    small = trained()
    small.vocabulary = DraftVocabulary(torch.tensor([1]), V)
    with pytest.raises(ConfigError, match="TGI has no draft vocabulary"):
        write_tgi(tmp_path, small, BASE, base_name="x")
    with pytest.raises(ConfigError, match="before `bind`"):
        write_vllm(tmp_path, trained(), BASE)
    biased = trained()
    biased.bind(LM_HEAD, LM_HEAD, torch.ones(V))
    with pytest.raises(ConfigError, match="LM head has a bias"):
        write_vllm(tmp_path, biased, BASE)
    assert list(tmp_path.iterdir()) == []
    write_tgi(tmp_path, small, BASE, base_name="x", drops_vocabulary=True)
    assert load_heads(tmp_path, BASE)[0].vocabulary is None
