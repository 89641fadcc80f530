"""`choose` against a slow oracle that walks the pages one by one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oval_core.routing.choose import choose


def slowly(scores: list[float], counts: list[int], kept: list[bool], budget: int) -> list[bool]:
    """Greedy by score a token, in plain numbers; among equals the earlier page."""
    chosen = [own and n > 0 for own, n in zip(kept, counts, strict=True)]
    left = budget - sum(n for n, own in zip(counts, kept, strict=True) if own)
    density = [s - math.log(max(n, 1)) for s, n in zip(scores, counts, strict=True)]
    for i in sorted(range(len(scores)), key=lambda i: (-density[i], i)):
        if not kept[i] and counts[i] and scores[i] > -math.inf and counts[i] <= left:
            chosen[i] = True
            left -= counts[i]
    return chosen


PAGES = st.lists(
    st.tuples(
        st.one_of(st.integers(-8, 8).map(float), st.just(-math.inf)),
        st.sampled_from([0, 1, 1, 1, 2, 3, 5, 16, 32]),
        st.sampled_from([False, False, False, True]),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(pages=PAGES, budget=st.integers(0, 120))
def test_equals_the_slow_choice(pages: list[tuple[float, int, bool]], budget: int) -> None:
    scores, counts, kept = (list(column) for column in zip(*pages, strict=True))
    got = choose(
        torch.tensor([scores], dtype=torch.float64),
        torch.tensor(counts),
        torch.tensor(kept),
        budget,
    )
    assert got[0].tolist() == slowly(scores, counts, kept, budget)


def test_many_small_pages_fill_what_a_large_one_leaves() -> None:
    """Up to 31 pages of a token each may follow."""
    scores = torch.tensor([[9.0, 8.0, *[0.0 - i / 100 for i in range(40)]]])
    counts = torch.tensor([32, 32, *[1] * 40])
    chosen = choose(scores, counts, torch.zeros(42, dtype=torch.bool), 63)
    assert (chosen * counts).sum() == 63
    assert chosen[0, :2].tolist() == [True, False]


def test_equal_sizes_are_top_k() -> None:
    scores = torch.randn(3, 50)
    chosen = choose(scores, torch.full((50,), 16), torch.zeros(50, dtype=torch.bool), 16 * 7 + 15)
    top = torch.zeros(3, 50, dtype=torch.bool).scatter(-1, scores.topk(7).indices, True)
    assert torch.equal(chosen, top)


@pytest.mark.parametrize("by_group", [False, True])
def test_leading_dimensions_and_budgets_by_step(by_group: bool) -> None:
    scores, counts = torch.randn(5, 2, 30).double(), torch.randint(1, 33, (30,))
    kept = torch.rand(5, 2, 30) < 0.1 if by_group else torch.rand(5, 30) < 0.1
    budgets = torch.tensor([10, 60, 100, 200, 1000])
    chosen = choose(scores, counts, kept, budgets)
    for step in range(5):
        for group in range(2):
            own = kept[step, group] if by_group else kept[step]
            want = slowly(
                scores[step, group].tolist(), counts.tolist(), own.tolist(), int(budgets[step])
            )
            assert chosen[step, group].tolist() == want


def test_kept_pages_of_one_mask_serve_every_step() -> None:
    scores, kept = torch.randn(4, 2, 6), torch.tensor([True, False, False, False, False, True])
    chosen = choose(scores, torch.full((6,), 4), kept, 4)
    assert torch.equal(chosen, kept.expand(4, 2, 6))


def test_scores_are_not_changed() -> None:
    scores, kept = torch.randn(2, 6), torch.zeros(6, dtype=torch.bool)
    before = scores.clone()
    choose(scores, torch.tensor([1, 2, 3, 4, 5, 6]), kept, 9)
    assert torch.equal(scores, before)
