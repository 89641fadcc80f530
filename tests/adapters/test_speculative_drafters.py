"""Every drafter that settings name keeps greedy text, alone, in batches, with tiers and under policies that select."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TINY, build, one_thread, padded, prompt, shared
from transformers import PreTrainedModel

from oval_adapters import attach
from oval_adapters.speculative import drafters as home
from oval_core.errors import ConfigError, UnsupportedModelError
from oval_spec.fusion_trial import AUTO_ORDERS
from oval_spec.heads import create_heads
from oval_spec.layouts import save_heads

_one_thread = pytest.fixture(autouse=True)(one_thread)

HIDDEN = 48
GREEDY = {"max_new_tokens": 20, "do_sample": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained heads, and a draft model, for the tiny Llama."""
    root = tmp_path_factory.mktemp("drafts")
    torch.manual_seed(5)
    heads = create_heads("medusa", {"num_heads": 3, "hidden_size": HIDDEN, "num_layers": 1})
    heads.accuracy = [[0.4, 0.2], [0.2, 0.1], [0.1, 0.1]]
    save_heads(root / "heads", heads, home.base_facts(shared("llama")))
    build("llama", 3).save_pretrained(root / "model")
    return root


SETTINGS: dict[str, dict[str, Any]] = {
    "auto": {},
    "none": {"drafter": "none"},
    "ngram": {"drafter": "ngram", "ngram_min": 1},
    "medusa": {"drafter": "medusa", "heads": "heads", "tree": "mc_sim_7b_63"},
    "grown": {"drafter": "medusa", "heads": "heads", "max_nodes": 9},
    "hybrid": {"drafter": "hybrid", "heads": "heads", "ngram_min": 1},
    "draft": {"drafter": "draft", "draft_model": "model", "depth": 3},
    "window": {"drafter": "self", "self_policy": "window", "self_budget": 8},
    "routed": {"drafter": "self", "self_policy": "routed", "self_budget": 8},
}
NAMES = {"auto": "ngram", "grown": "medusa", "window": "self", "routed": "self"}
TEXTS: dict[str, dict[str, Any]] = {
    "one": {"inputs": prompt(9).repeat(1, 3)},
    "padded": padded([26, 9, 14]),
}


def placed(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The settings with real paths."""
    paths = ("heads", "draft_model")
    return {k: str(folder / v) if k in paths else v for k, v in settings.items()}


def run(model: PreTrainedModel, config: dict[str, Any], **call: Any) -> tuple[Any, dict[str, Any]]:
    with attach(model, config) as oval:
        got = model.generate(**call, **GREEDY, custom_generate=oval.speculative)
        return got.tolist(), oval.stats()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("case", SETTINGS)
def test_each_drafter_keeps_the_text(case: str, text: str, folder: Path) -> None:
    model, call = shared("llama"), TEXTS[text]
    want = model.generate(**call, **GREEDY).tolist()
    got, stats = run(model, {"speculation": placed(SETTINGS[case], folder)}, **call)
    assert got == want
    speculation = stats["speculation"]
    assert speculation["drafter"] == NAMES.get(case, case)
    assert speculation["lossless"]
    assert speculation["emitted"] == 19 * len(want)
    if case not in ("none", "auto"):  # two tokens in a row never come again here
        assert speculation["drafted"] > 0


@pytest.mark.parametrize("fusion", ["intersection", "none"])
@pytest.mark.parametrize("case", ["ngram", "grown"])
def test_tiers_change_no_token(case: str, fusion: str, folder: Path) -> None:
    model, ids = shared("llama"), prompt(60).repeat(1, 2)
    want = model.generate(ids, **GREEDY).tolist()
    settings = {**placed(SETTINGS[case], folder), "fusion": fusion}
    tiers = {"fast_tokens": 64}
    got, stats = run(model, {"page_size": 2, "tiers": tiers, "speculation": settings}, inputs=ids)
    assert got == want
    assert ("fusion" in stats["speculation"]) == (fusion != "none")
    if fusion != "none":
        assert stats["speculation"]["fusion"]["verifications"] > 0


def test_fusion_auto_measures_and_changes_no_token(folder: Path) -> None:
    routing = {"token_budget": 40, "window_size": 8, "num_sink_tokens": 4}
    config = {"page_size": 4, "policy": "routed", "routing": routing, "tiers": {"fast_tokens": 96}}
    texts, ids = {}, prompt(90)
    for fusion in ("none", "intersection", "auto"):
        fixed = {"max_nodes": 6, "turns_off": False}  # a selection depends on where forwards end
        settings = placed({**SETTINGS["medusa"], **fixed, "fusion": fusion}, folder)
        texts[fusion], stats = run(shared("llama"), {**config, "speculation": settings}, inputs=ids)
    assert texts["auto"] == texts["intersection"] == texts["none"]
    told = stats["speculation"]["fusion"]
    assert told["order"] in AUTO_ORDERS
    assert 0 < told["verifications"] < stats["speculation"]["steps"]


def test_a_tree_is_no_larger_than_what_a_selection_is_made_for(folder: Path) -> None:
    routing = {"max_queries": 5, "token_budget": 40, "window_size": 8, "num_sink_tokens": 4}
    settings = placed({**SETTINGS["medusa"], "max_nodes": 30}, folder)
    config = {"page_size": 4, "policy": "routed", "routing": routing, "speculation": settings}
    _, stats = run(shared("llama"), config, inputs=prompt(90))
    speculation = stats["speculation"]
    assert 0 < speculation["drafted"] <= 4 * speculation["steps"]
    assert stats["routing"]["selections"] > 0


def test_heads_that_ship_are_taken_for_their_model_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home, "shipped_heads", lambda: {"tiny": folder / "heads"})
    _, stats = run(shared("llama"), {}, inputs=prompt(12))
    assert stats["speculation"]["drafter"] == "hybrid"
    _, stats = run(shared("qwen2"), {}, inputs=prompt(12))
    assert stats["speculation"]["drafter"] == "ngram"
    with pytest.raises(ConfigError, match="qwen2"):
        run(
            shared("qwen2"),
            {"speculation": {"drafter": "medusa", "heads": "tiny"}},
            inputs=prompt(5),
        )


def test_typical_acceptance_says_that_it_is_lossy(folder: Path) -> None:
    settings = {**placed(SETTINGS["grown"], folder), "verification": "typical"}
    _, stats = run(shared("llama"), {"speculation": settings}, inputs=prompt(12))
    assert stats["speculation"]["lossless"] is False


def test_trees_end_where_the_positions_of_the_model_end() -> None:
    model = build("llama", max_position_embeddings=40)
    ids = prompt(9).repeat(1, 3)
    want = model.generate(ids, max_new_tokens=20, do_sample=False).tolist()
    with attach(model, {"speculation": {"drafter": "ngram", "ngram_min": 1}}) as oval:
        got = model.generate(
            ids, max_new_tokens=20, do_sample=False, custom_generate=oval.speculative
        )
    assert got.tolist() == want


def test_every_tiny_family_can_be_speculated() -> None:
    for name in TINY:
        model = shared(name)
        ids = prompt(7).repeat(1, 3)
        want = model.generate(ids, max_new_tokens=8).tolist()
        with attach(model, {"speculation": {"drafter": "ngram", "ngram_min": 1}}) as oval:
            got = model.generate(ids, max_new_tokens=8, custom_generate=oval.speculative)
        assert got.tolist() == want, name


@pytest.mark.parametrize("count", [3, 12])
def test_no_node_lies_where_a_model_scales_its_positions_anew(count: int) -> None:
    model = build("phi3", original_max_position_embeddings=30)
    call = {"inputs": prompt(9).repeat(1, 3), "max_new_tokens": count, "do_sample": False}
    with attach(model, {"speculation": {"drafter": "ngram", "ngram_min": 1}}) as oval:
        if count == 3:
            want = model.generate(**call).tolist()
            assert model.generate(**call, custom_generate=oval.speculative).tolist() == want
            return
        for extra in ({}, {"custom_generate": oval.speculative}):
            with pytest.raises(UnsupportedModelError, match="outgrows 30 tokens"):
                model.generate(**call, **extra)
