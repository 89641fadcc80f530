"""Images in a fast pool that holds little: what fits is counted to the slot, and what fits runs, however scattered the pool is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from core.dense_twin import CPU
from core.tier_twin import FACTS, TierTwin
from hypothesis import given, settings
from hypothesis import strategies as st

from oval_core.errors import FastMemoryError
from oval_core.tiers.fast_memory import _least_tokens
from oval_core.values import ImageSet, RowRequest

Layout = list[int]
"""Lengths of texts and images in turn, a text first and last."""


class ImageTwin(TierTwin):
    """A tiered cache whose forwards bring texts and images; an image has pages of every third token."""

    layouts: Sequence[Layout] = ()

    def bring(self, layouts: Sequence[Layout], commit: bool = True) -> None:
        self.layouts = layouts
        self.forward([sum(own) for own in layouts], commit=commit)

    def begin(
        self,
        counts: Sequence[int],
        num_queries: int | None = None,
        reserve: int = 0,
        hidden_keys: Sequence[torch.Tensor | None] | None = None,
        places: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor | None]:
        queries = num_queries or max(counts)
        found = [torch.arange(queries - count, queries) for count in counts]
        requests = [
            RowRequest(sum(own), at, images=images_of(own))
            for own, at in zip(self.layouts, found, strict=True)
        ]
        self.cache.begin(requests, queries, CPU, reserve)
        return list(found)


def images_of(layout: Layout) -> tuple[ImageSet, ...]:
    sets, first = [], 0
    for place, count in enumerate(layout):
        if place % 2 and count:
            groups = [tuple(range(start, count, 3)) for start in range(min(3, count))]
            sets.append(ImageSet(first, tuple(groups)))
        first += count
    return tuple(sets)


def twin_of(extra: int, page_size: int, **tiers: object) -> ImageTwin:
    fast = _least_tokens(FACTS.num_layers, page_size) + extra
    return ImageTwin({"fast_tokens": fast, **tiers}, page_size=page_size)


LAYOUTS = st.one_of(
    st.tuples(st.integers(0, 9)),
    st.tuples(st.integers(0, 7), st.integers(1, 20), st.integers(0, 9)),
    st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(0, 3), st.integers(1, 9), st.integers(0, 5)),
).map(list)  # fmt: skip


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    extra=st.integers(0, 24),
    page_size=st.sampled_from([1, 3, 8]),
    rows=st.integers(1, 3),
    steps=st.lists(st.tuples(st.lists(LAYOUTS, min_size=3, max_size=3), st.booleans()), min_size=2, max_size=6),
)  # fmt: skip
def test_what_is_said_to_fit_runs_and_nothing_else_does(
    extra: int, page_size: int, rows: int, steps: list[tuple[list[Layout], bool]]
) -> None:
    twin = twin_of(extra, page_size, sink_tokens=0, recent_tokens=2)
    for layouts, commit in steps:
        layouts = layouts[:rows]
        if not any(map(sum, layouts)) or max([0, *twin.lengths]) > 90:
            continue
        if not twin.keys and not all(map(sum, layouts)):
            continue
        if twin.cache.takes(layouts):
            twin.bring(layouts, commit or not twin.keys)
        else:
            with pytest.raises(FastMemoryError, match="Pass fewer new tokens"):
                twin.bring(layouts)
            assert not twin.cache.is_running
        if twin.keys:
            twin.check_all()


def test_free_slots_in_pieces_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two open pages in the midst of the pool leave no place for a page, though there are slots enough."""
    twin = twin_of(0, 8, sink_tokens=0, recent_tokens=0)
    tiers, joined = twin.cache.tiers, []
    assert tiers.memory.pool_slots == 32
    join = tiers._join_free
    monkeypatch.setattr(tiers, "_join_free", lambda held: joined.append(len(held)) or join(held))
    twin.bring([[0, 5, 3], [0, 3, 2]])
    assert not twin.cache.takes([[0], [23]])
    assert twin.cache.takes([[0], [22]])  # two open pages of 8, and two more
    twin.bring([[0], [22]])
    twin.check_all()
    assert joined == [2]
    twin.bring([[3], [1]])
    twin.check_all()


def test_an_open_page_that_an_image_closes_makes_room_for_it() -> None:
    twin = twin_of(0, 8, sink_tokens=0, recent_tokens=0)
    twin.bring([[3]] * 4)  # the pool is full of open pages
    assert not twin.cache.takes([[1, 1, 0]] * 4)
    with pytest.raises(FastMemoryError):
        twin.bring([[1, 1, 0]] * 4)
    layouts = [[0, 8, 0]] * 4
    assert twin.cache.takes(layouts)
    twin.bring(layouts, commit=False)
    twin.check_all()
    assert [seq.tail is not None for seq in twin.cache.table.sequences] == [True] * 4, "open again"
    twin.bring([[2]] * 4)
    twin.check_all()
    twin.bring(layouts)
    twin.check_all()
    assert twin.cache.tiers.num_away == 4
