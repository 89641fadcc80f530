"""What a drafter is asked for fits into what is left, and nothing of a call stays behind it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from generate_scenarios import StopAt
from reference_speculative import ScriptedDrafter
from tiny_models import VOCAB, build, one_thread, padded, prompt, shared
from transformers import PreTrainedModel

from oval_adapters import Attachment, attach
from oval_adapters.speculative.self_draft import watched_cache
from oval_core.errors import ConfigError
from oval_spec.drafter import Draft, DraftRequest

_one_thread = pytest.fixture(autouse=True)(one_thread)
ALWAYS = {"turns_off": False, "max_nodes": 12}


class Asked(ScriptedDrafter):
    """Takes note of the length of the text at each request, its depth and its nodes: the text itself goes on."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: list[tuple[int, int, int]] = []
        self.states: list[torch.Tensor | None] = []

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Drafts what was written."""
        self.asked += [(len(r.ids), r.max_depth, r.max_nodes) for r in requests]
        self.states += [r.hidden for r in requests]
        return super().draft(requests)


def decode(
    oval: Attachment, want: torch.Tensor, kind: str, needs_hidden: bool = False, **call: Any
) -> Asked:
    """Runs one speculative call that must give this text; returns what drafted it."""
    drafter = Asked(dict(enumerate(want.tolist())), kind, VOCAB, 6, needs_hidden)
    got = oval.model.generate(
        **call,
        do_sample=False,
        custom_generate=oval.speculative,
        oval_drafter=drafter,
        speculation=ALWAYS,
    )
    assert got.tolist() == want.tolist()
    return drafter


def plain(model: PreTrainedModel, **call: Any) -> torch.Tensor:
    return model.generate(**call, do_sample=False)


@pytest.mark.parametrize("kind", ["right", "late"])
def test_no_more_is_asked_for_than_can_count(kind: str) -> None:
    model, call = shared("llama"), {"inputs": prompt(9, 2), "max_new_tokens": 15}
    want = plain(model, **call)
    with attach(model) as oval:
        drafter = decode(oval, want, kind, **call)
    assert len(drafter.asked) >= 4
    for length, depth, _ in drafter.asked:
        left = want.shape[1] - length
        assert left > 0, "a row that has all its tokens was asked for"
        assert depth == min(left - 1, ALWAYS["max_nodes"] - 1), "one more follows"


def test_a_tree_lies_within_the_positions_of_the_model() -> None:
    model = build("llama", max_position_embeddings=30)
    call = {"inputs": prompt(18), "max_new_tokens": 16}
    want = plain(model, **call)
    with attach(model) as oval:
        drafter = decode(oval, want, "right", **call)
    for length, _, nodes in drafter.asked:
        place = length - 1  # of the root
        assert nodes == max(1, min(ALWAYS["max_nodes"], 30 - place))
    assert drafter.asked[-1][0] > 30


def test_no_node_lies_beyond_what_a_cache_is_kept_for() -> None:
    model = build("phi3", original_max_position_embeddings=30)
    call = {"inputs": prompt(18), "max_new_tokens": 16, "stopping_criteria": [StopAt(26)]}
    want = plain(model, **call)
    assert 26 <= want.shape[1] <= 30
    with attach(model) as oval:
        drafter = decode(oval, want, "right", **call)
    assert max(length - 1 + depth for length, depth, _ in drafter.asked) == 29, "the last of 30"


@pytest.mark.parametrize("ahead", [0, 1])
def test_rows_that_grow_apart_meet_again(ahead: int) -> None:
    model, ids = shared("mistral-window"), prompt(9, 2)
    with attach(model) as oval:
        cache = oval.new_cache()
        for turn in range(2):
            text = {"inputs": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 11}
            want = plain(model, **text, use_oval=False)
            drafter = ScriptedDrafter({ahead: want[ahead].tolist()}, "right", VOCAB)
            call = {"custom_generate": oval.speculative, "oval_drafter": drafter, "cache": cache}
            got = model.generate(**text, speculation=ALWAYS, **call)
            assert got.tolist() == want.tolist(), turn
            assert len(drafter.proposed) < 2 * 10, "none was ahead"
            assert cache.get_seq_length() == want.shape[1] - 1
            ids = torch.cat([want, prompt(4, 2, seed=4)], 1)


def test_windows_count_columns_of_trees_behind_holes() -> None:
    model, ids = shared("mistral-window"), prompt(14)
    mask = torch.ones_like(ids)
    mask[0, 5:9] = 0
    call = {"inputs": ids, "attention_mask": mask, "max_new_tokens": 16}
    want = plain(model, **call)
    texts = [want[0, [*range(5), *range(9, 30)]].tolist()]
    drafter = ScriptedDrafter(dict(enumerate(texts)), "tree", VOCAB)
    with attach(model) as oval:
        extra = {"custom_generate": oval.speculative, "oval_drafter": drafter}
        got = model.generate(**call, **extra, speculation=ALWAYS)
        assert oval.stats()["speculation"]["accepted"] > 0
    assert got.tolist() == want.tolist()
    assert not all(tree.is_chain for tree in drafter.proposed)


def test_a_drafter_of_one_call_is_not_taken_in_the_next() -> None:
    model, call = shared("llama"), {"inputs": prompt(9), "max_new_tokens": 8}
    want = plain(model, **call)
    with attach(model) as oval:
        drafter = decode(oval, want, "right", **call)
        asked = len(drafter.asked)
        oval.model.generate(**call, custom_generate=oval.speculative, speculation=ALWAYS)
        assert len(drafter.asked) == asked
        assert oval.stats()["speculation"]["drafter"] == "ngram"


def test_hidden_states_are_kept_for_those_who_ask_alone() -> None:
    model, call = shared("llama"), {"inputs": prompt(9), "max_new_tokens": 8}
    want = plain(model, **call)
    with attach(model) as oval:
        cache = oval.new_cache()
        decode(oval, want, "right", needs_hidden=True, cache=cache, **call)
        assert cache.keeps_hidden is False
        cache.reset()
        drafter = decode(oval, want, "right", cache=cache, **call)
        assert cache.last_hidden is None
        assert drafter.states.count(None) == len(drafter.states) > 0


@pytest.mark.parametrize("drafter", ["ngram", "self"])
def test_a_cache_is_let_go_when_its_call_ends(drafter: str) -> None:
    model, seen = shared("llama"), []
    with attach(model) as oval:
        made = oval.new_cache

        def watched(*args: Any) -> Any:
            cache = made(*args)
            seen.append(weakref.ref(cache))
            return cache

        oval.new_cache = watched  # type: ignore[method-assign]
        gc.disable()
        try:
            for batch in ({"inputs": prompt(9).repeat(1, 3)}, padded([9, 12])):
                model.generate(
                    **batch,
                    max_new_tokens=8,
                    custom_generate=oval.speculative,
                    speculation={"drafter": drafter, "turns_off": False},
                )
            assert len(seen) == 2
            assert [cache() for cache in seen] == [None, None], "something holds it"
        finally:
            gc.enable()


WINDOWED = {
    "all": ("mistral-window", r"a model whose 3 layers all have a sliding window\. Allowed: models with a layer that"),
    "the rest is dense": ("gemma2", r"whose only layers without a sliding window, \[1\], are in routing.dense_layers \[0, 1\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("self_policy", ["routed", "window"])
def test_a_model_of_windows_cannot_draft_for_itself(name: str, self_policy: str) -> None:
    model, facts = WINDOWED[name]
    call = {"speculation": {"drafter": "self", "self_policy": self_policy}}
    said = (
        f"^speculation.drafter: got 'self' for .*{facts}.*Choose another drafter, such as 'ngram'"
    )
    with attach(build(model)) as oval, pytest.raises(ConfigError, match=said):
        oval.model.generate(prompt(9), custom_generate=oval.speculative, max_new_tokens=2, **call)


@pytest.mark.parametrize("name", WINDOWED)
def test_pages_of_a_model_of_windows_are_not_foreseen(name: str) -> None:
    model, facts = WINDOWED[name]
    settings = {"page_size": 4, "tiers": {"fast_tokens": 64}}
    call = {"speculation": {"drafter": "ngram", "fusion": "union"}}
    with attach(build(model), settings) as oval:
        said = f"^speculation.fusion: got 'union' for .*{facts}.*Choose fusion 'none'"
        with pytest.raises(ConfigError, match=said):
            oval.model.generate(
                prompt(9), custom_generate=oval.speculative, max_new_tokens=2, **call
            )
        with pytest.raises(ConfigError, match=f"^watched_cache: got .*{facts}.*new_cache"):
            watched_cache(oval)
        call["speculation"]["fusion"] = "none"
        oval.model.generate(prompt(9), custom_generate=oval.speculative, max_new_tokens=2, **call)
