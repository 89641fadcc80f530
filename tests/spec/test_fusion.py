"""Fused page orders against a plain statement of what they mean."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oval_core.errors import ConfigError
from oval_spec.fusion import PagePrediction, fuse

LISTS = ("draft", "intersection", "target", "union")


@st.composite
def sides(draw: st.DrawFn) -> tuple[PagePrediction, PagePrediction]:
    ids = draw(st.lists(st.integers(0, 99), min_size=1, max_size=12, unique=True))
    counts = tuple(draw(st.integers(1, 16)) for _ in ids)
    share = st.floats(0.001, 1.0)
    made = [tuple(draw(share) for _ in ids) for _ in range(2)]
    return tuple(PagePrediction(tuple(ids), counts, shares) for shares in made)  # type: ignore[return-value]


def size(side: PagePrediction, ids: frozenset[int]) -> int:
    counts = dict(zip(side.page_ids, side.counts, strict=True))
    return sum(counts[page_id] for page_id in ids)


@given(sides(), st.integers(0, 100))
def test_a_side_picks_within_its_budget_and_leaves_nothing_that_fits(
    pair: tuple[PagePrediction, PagePrediction], budget: int
) -> None:
    side = pair[0]
    picked = side.picked(budget)
    assert size(side, picked) <= budget
    left = budget - size(side, picked)
    for page_id, count in zip(side.page_ids, side.counts, strict=True):
        assert page_id in picked or count > left


@given(sides(), st.integers(0, 100))
def test_intersection_comes_first_then_the_rest_of_the_union(
    pair: tuple[PagePrediction, PagePrediction], budget: int
) -> None:
    draft, target = pair
    ours, theirs = target.picked(budget), draft.picked(budget)
    fused = fuse(draft, target, "intersection", budget)
    cut = fused.num_common
    assert set(fused.page_ids[:cut]) == ours & theirs
    assert set(fused.page_ids[cut:]) == ours ^ theirs
    union = fuse(draft, target, "union", budget)
    assert set(union.page_ids) == set(fused.page_ids)
    assert set(fuse(draft, target, "draft", budget).page_ids) == theirs
    assert set(fuse(draft, target, "target", budget).page_ids) == ours


@given(sides(), st.integers(0, 100), st.sampled_from((*LISTS, "recency")))
def test_scores_fall_in_the_order_of_the_pages(
    pair: tuple[PagePrediction, PagePrediction], budget: int, order: str
) -> None:
    fused = fuse(*pair, order, budget)
    assert len(set(fused.page_ids)) == len(fused.page_ids)
    assert fused.scores.keys() == set(fused.page_ids)
    scores = [fused.scores[page_id] for page_id in fused.page_ids]
    assert scores == sorted(scores, reverse=True)
    assert min(scores, default=1.0) > 0


@given(sides(), st.integers(0, 100))
def test_swapping_the_sides_changes_neither_intersection_nor_union(
    pair: tuple[PagePrediction, PagePrediction], budget: int
) -> None:
    draft, target = pair
    for order in ("intersection", "union"):
        assert fuse(draft, target, order, budget) == fuse(target, draft, order, budget)


@given(sides(), st.integers(0, 100), st.sampled_from(("intersection", "union")))
def test_one_side_that_cannot_tell_leaves_it_to_the_other(
    pair: tuple[PagePrediction, PagePrediction], budget: int, order: str
) -> None:
    draft, target = pair
    alone = fuse(None, target, "target", budget)
    assert fuse(None, target, order, budget) == alone
    assert fuse(draft, None, order, budget) == fuse(draft, None, "draft", budget)
    assert not fuse(None, None, order, budget).page_ids


def test_recency_takes_the_newest_pages_newest_first() -> None:
    side = PagePrediction((4, 9, 2, 7), (8, 8, 8, 4), (0.9, 0.05, 0.04, 0.01))
    assert fuse(None, side, "recency", 12).page_ids == (7, 2)
    assert fuse(side, None, "recency", 11).page_ids == (7,)
    assert fuse(side, side, "none", 100).page_ids == ()


def test_share_of_several_states_is_that_of_the_one_that_wants_it_most() -> None:
    scores = torch.log(torch.tensor([[[0.8, 0.2], [0.5, 0.5]], [[0.1, 0.9], [0.5, 0.5]]]))
    side = PagePrediction.of_scores((3, 5), (16, 16), scores)
    assert side.shares == pytest.approx((0.65, 0.7))
    one = PagePrediction.of_scores((3, 5), (16, 16), scores[0])
    assert one.shares == pytest.approx((0.65, 0.35))


def test_a_group_without_any_page_wants_nothing() -> None:
    scores = torch.tensor([[0.0, 0.0], [float("-inf")] * 2])
    assert PagePrediction.of_scores((1, 2), (4, 4), scores).shares == pytest.approx((0.25, 0.25))


def test_unknown_order_is_named() -> None:
    with pytest.raises(ConfigError, match="speculation.fusion: got 'intersect'.*intersection"):
        fuse(None, None, "intersect", 10)
