"""What a cache says, and what state it is in, where held forwards are used wrongly or are cut off."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import one_thread, prompt, shared
from tiny_routers import TIERS

from oval_adapters import attach
from oval_adapters.hf_cache import OvalCache
from oval_core.errors import CacheMismatchError, FastMemoryError, OvalError

_one_thread = pytest.fixture(autouse=True)(one_thread)


def filled(oval: Any, rows: int = 2) -> OvalCache:
    cache = oval.new_cache()
    shared("llama")(prompt(8, rows), cache=cache)
    return cache


BAD_TREES = {
    "one row": [3],
    "three rows": [1, 1, 1],
    "nothing": [0, 0],
    "negative": [-1, 2],
    "bool": [True, 2],
    "float": [1.5, 2],
    "ints": [torch.ones(2, 2, dtype=torch.long), 1],
    "not square": [torch.ones(2, 3, dtype=torch.bool), 1],
    "blind": [torch.zeros(2, 2, dtype=torch.bool), 1],
}


@pytest.mark.parametrize("name", BAD_TREES)
@torch.no_grad()
def test_a_tree_that_is_none_is_refused(name: str) -> None:
    with attach(shared("llama")) as oval:
        cache = filled(oval)
        with pytest.raises(CacheMismatchError, match="hold: got"):
            cache.hold(BAD_TREES[name])
        assert not cache.is_held
        shared("llama")(prompt(1, 2), cache=cache)
        assert cache.get_seq_length() == 9


@pytest.mark.parametrize(
    "places", [[[0]], [[1, 0], []], [[0, 0], []], [[2], []], [[0], [0]], [[-1], []]]
)
@torch.no_grad()
def test_places_that_were_not_brought_are_refused(places: list[list[int]]) -> None:
    with attach(shared("llama")) as oval:
        cache = filled(oval)
        cache.hold([2, 0])
        shared("llama")(prompt(2, 2), cache=cache)
        with pytest.raises(CacheMismatchError, match="accept: got places"):
            cache.accept(places)
        cache.accept([[0], []])
        assert [seq.length for seq in cache.paged.table.sequences] == [9, 8]


CALLS: dict[str, Callable[[OvalCache], object]] = {
    "forward": lambda cache: shared("llama")(prompt(1, 2), cache=cache),
    "hold": lambda cache: cache.hold([1, 1]),
    "crop": lambda cache: cache.crop(-1),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "copy": copy.deepcopy,
    "grid": lambda cache: cache.to_dynamic_cache(),
    "drafting": lambda cache: cache.drafting(cache.paged.policy).__enter__(),
}


@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_nothing_else_is_done_while_a_forward_is_held(name: str) -> None:
    with attach(shared("llama")) as oval:
        cache = filled(oval)
        cache.hold([2, 1])
        shared("llama")(prompt(2, 2), cache=cache)
        with pytest.raises(CacheMismatchError, match="while a forward is held"):
            CALLS[name](cache)
        cache.accept([[0, 1], [0]])
        assert cache.get_seq_length() == 10


@torch.no_grad()
def test_a_forward_that_was_not_announced_is_refused() -> None:
    model = shared("llama")
    with attach(model) as oval:
        cache = filled(oval)
        with pytest.raises(CacheMismatchError, match="without a held forward"):
            cache.accept([[], []])
        cache.hold([3, 1])
        with pytest.raises(CacheMismatchError, match="without a held forward"):
            cache.accept([[], []])
        with pytest.raises(CacheMismatchError, match="held forward: got"):
            model(prompt(2, 2), cache=cache)
        with pytest.raises(CacheMismatchError, match="attention_mask"):
            model(prompt(3, 2), attention_mask=torch.ones(2, 11), cache=cache)
        model(prompt(3, 2), cache=cache)
        cache.reset()
        assert not cache.is_held
        model(prompt(3, 1), cache=cache)
        assert cache.get_seq_length() == 3


@torch.no_grad()
def test_an_error_in_a_held_forward_takes_it_back() -> None:
    model = shared("llama")
    with attach(model) as oval:
        cache = filled(oval)

        def fail(*_: object) -> None:
            raise KeyboardInterrupt

        handle = model.model.layers[1].register_forward_pre_hook(fail)
        cache.hold([3, 1])
        try:
            with pytest.raises(KeyboardInterrupt):
                model(prompt(3, 2), cache=cache)
        finally:
            handle.remove()
        assert not cache.is_held
        model(prompt(1, 2), cache=cache)
        assert [seq.length for seq in cache.paged.table.sequences] == [9, 9]


@torch.no_grad()
def test_an_error_while_accepting_takes_the_forward_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared("llama")
    with attach(model) as oval:
        cache = filled(oval)
        cache.hold([3, 1])
        model(prompt(3, 2), cache=cache)

        def fail(*_: object) -> None:
            raise OvalError("no")

        with monkeypatch.context() as patched:
            patched.setattr(cache.paged, "_end_forward", fail)
            with pytest.raises(OvalError, match="no"):
                cache.accept([[0, 2], [0]])
        cache.abort()
        assert [seq.length for seq in cache.paged.table.sequences] == [8, 8]
        model(prompt(1, 2), cache=cache)
        assert cache.get_seq_length() == 9


@torch.no_grad()
def test_a_tree_must_fit_into_fast_memory() -> None:
    with attach(shared("llama"), {"page_size": 4, "tiers": TIERS}) as oval:
        cache = filled(oval)
        most = cache.max_new_tokens(2)
        assert most is not None
        with pytest.raises(FastMemoryError, match="hold: got a tree"):
            cache.hold([most + 1, 1])
        cache.hold([most, 1])
        shared("llama")(prompt(most, 2), cache=cache)
        cache.accept([list(range(most)), [0]])
        assert [seq.length for seq in cache.paged.table.sequences] == [8 + most, 9]
    with attach(shared("llama")) as oval:
        assert oval.new_cache().max_new_tokens(2) is None
