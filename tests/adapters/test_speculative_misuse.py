"""Prompts and drafters that no text can go on from are refused before they change one, and the cache stays good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, one_thread, prompt, shared

from oval_adapters import attach
from oval_core.errors import CacheMismatchError, ConfigError
from oval_spec.drafter import Draft, DraftRequest
from oval_spec.token_tree import TokenTree

_one_thread = pytest.fixture(autouse=True)(one_thread)

Drafts = Callable[[Sequence[DraftRequest]], Any]


def chain(*tokens: int) -> Draft:
    return Draft(TokenTree.chain(tokens))


class Stranger:
    """A drafter of the caller, right at first, and wrong in its third step."""

    name = "stranger"
    needs_hidden = False

    def __init__(self, wrong: Drafts) -> None:
        self._wrong = wrong
        self._steps = 0

    def reset(self) -> None:
        """Does nothing."""

    def draft(self, requests: Sequence[DraftRequest]) -> Any:
        """Returns roots alone, or what is wrong."""
        self._steps += 1
        return self._wrong(requests) if self._steps == 3 else [chain(r.ids[-1]) for r in requests]


WRONG: dict[str, tuple[Drafts, str]] = {
    "another root": (lambda rs: [chain((r.ids[-1] + 1) % VOCAB, 7) for r in rs], "with root"),
    "too few": (lambda rs: [chain(rs[0].ids[-1])], r"\['Draft'\] for 2 requests"),
    "none": (lambda rs: None, "None for 2 requests"),
    "trees": (lambda rs: [TokenTree.chain([r.ids[-1]]) for r in rs], "'TokenTree', 'TokenTree'"),
    "no such token": (lambda rs: [chain(r.ids[-1], VOCAB) for r in rs], f"Allowed: 0..{VOCAB - 1}"),
    "below zero": (lambda rs: [chain(r.ids[-1], -1) for r in rs], "got tokens -1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_drafter_must_not_return_is_named(case: str) -> None:
    model, ids = shared("llama"), prompt(9, 2)
    wrong, message = WRONG[case]
    want = model.generate(ids, max_new_tokens=8, do_sample=False)
    with attach(model) as oval:
        cache = oval.new_cache()
        call = {"cache": cache, "do_sample": False, "custom_generate": oval.speculative}
        with pytest.raises(ConfigError, match=message):
            model.generate(ids, max_new_tokens=8, oval_drafter=Stranger(wrong), **call)
        cached = cache.get_seq_length()
        assert cached == 9 + 2, "two steps were right"
        got = model.generate(want[:, : cached + 1], max_new_tokens=5, **call)
    assert got.tolist() == want.tolist()


def test_the_last_token_of_the_vocabulary_may_be_drafted() -> None:
    model, ids = shared("llama"), prompt(9, 2)
    with attach(model) as oval:
        got = model.generate(
            ids,
            max_new_tokens=5,
            custom_generate=oval.speculative,
            oval_drafter=Stranger(lambda rs: [chain(r.ids[-1], VOCAB - 1) for r in rs]),
        )
        assert got.tolist() == model.generate(ids, max_new_tokens=5, use_oval=False).tolist()


@pytest.mark.parametrize("given", ["mask", "pad tokens"])
def test_padding_on_the_right_is_refused(given: str) -> None:
    model, ids = shared("llama"), prompt(9, 2)
    ids[1, 6:] = 0  # the model's pad token: `generate` makes the mask where none is passed
    mask = {"attention_mask": (ids != 0).long()} if given == "mask" else {}
    with attach(model) as oval:
        with pytest.raises(ConfigError, match="padding on the right"):
            model.generate(ids, **mask, max_new_tokens=3, custom_generate=oval.speculative)
        assert oval.stats()["tokens_written"] == 0, "work was done before"
        left = torch.cat([ids[:, 6:], ids[:, :6]], 1)
        model.generate(left, max_new_tokens=3, custom_generate=oval.speculative)


@pytest.mark.parametrize("is_speculative", [True, False])
def test_a_text_without_a_new_token_is_refused(is_speculative: bool) -> None:
    model, ids = shared("llama"), prompt(9)
    with attach(model) as oval:
        extra = {"custom_generate": oval.speculative} if is_speculative else {}
        cache = oval.new_cache()
        for text in (ids[:, :0], ids[:, :5]):
            with pytest.raises(CacheMismatchError, match="got no new token"):
                model.generate(text, max_new_tokens=3, cache=cache, **extra)
            cache.reset()
            model.generate(ids, max_new_tokens=3, cache=cache, **extra)
        got = model.generate(ids, max_new_tokens=3, **extra)
    assert got.tolist() == model.generate(ids, max_new_tokens=3).tolist()


def test_a_wrong_tree_is_named_whoever_drafts() -> None:
    model = shared("llama")
    with attach(model) as oval:
        with pytest.raises(ConfigError, match=r"speculation\.tree: got 'mc_sim'"):
            model.generate(
                prompt(5),
                custom_generate=oval.speculative,
                speculation={"drafter": "ngram", "tree": "mc_sim"},
            )
        assert oval.stats()["tokens_written"] == 0, "work was done before"
