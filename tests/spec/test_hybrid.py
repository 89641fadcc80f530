"""Two trees in one: no path twice, none that lacks its beginning, the heads' states kept."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_spec import token_paths

from oval_spec.drafter import Draft, DraftRequest
from oval_spec.hybrid import FIXED_CHANCE, HybridDrafter, merge_trees
from oval_spec.ngram import NgramDrafter
from oval_spec.token_tree import TokenTree


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    tokens, parents = [0], [-1]
    for _ in range(draw(st.integers(0, 9))):
        parent, token = draw(st.integers(0, len(tokens) - 1)), draw(st.integers(0, 2))
        if (parent, token) not in set(zip(parents, tokens, strict=True)):
            tokens.append(token)
            parents.append(parent)
    return TokenTree(tuple(tokens), tuple(parents))


def falling(tree: TokenTree, steps: list[float]) -> list[float]:
    """Chances that fall along every path."""
    chances = [1.0]
    for node in range(1, len(tree)):
        chances.append(chances[tree.parents[node]] * steps[node % len(steps)])
    return chances


STEPS = st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), min_size=1, max_size=5)


@settings(deadline=None, derandomize=True)
@given(trees(), trees(), STEPS, STEPS, st.integers(1, 20))
def test_the_likeliest_paths_of_both_trees_are_kept(
    first: TokenTree, second: TokenTree, own: list[float], other: list[float], nodes: int
) -> None:
    guesses = [(tree, falling(tree, by)) for tree, by in ((first, own), (second, other))]
    merged, chances = merge_trees(guesses[0], guesses[1], nodes)
    paths = token_paths(merged)
    missed: dict[tuple[int, ...], float] = {}
    for tree, likely in guesses:
        for path, chance in zip(token_paths(tree), likely, strict=True):
            missed[path] = missed.get(path, 1.0) * (1 - chance)
    assert len(set(paths)) == len(paths) == min(nodes, len(missed))
    assert list(chances) == pytest.approx([1 - missed[path] for path in paths])
    assert list(chances) == sorted(chances, reverse=True)
    left = [1 - missed[path] for path in missed if path not in paths]
    assert all(chance <= chances[-1] for chance in left)


class Heads:
    """Drafts as many children of the root as it may, one below the other's; remembers what it was asked."""

    name = "heads"
    needs_hidden = True

    def __init__(self) -> None:
        self.asked: list[DraftRequest] = []
        self.resets = 0
        self.chance: float | None = 0.9

    def reset(self) -> None:
        self.resets += 1

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.asked += requests
        return [
            Draft(
                TokenTree(
                    (request.ids[-1], *range(100, 99 + request.max_nodes)),
                    (-1, *[0] * (request.max_nodes - 1)),
                ),
                torch.full((2, 4), float(request.row)),
                chances=None
                if self.chance is None
                else (1.0, *[self.chance] * (request.max_nodes - 1)),
            )
            for request in requests
        ]


def drafter() -> tuple[HybridDrafter, Heads]:
    heads = Heads()
    return HybridDrafter(NgramDrafter(ngram_max=3, ngram_min=2, depth=8), heads), heads


def test_the_surer_side_gets_the_nodes() -> None:
    hybrid, heads = drafter()
    assert hybrid.needs_hidden
    long = [1, 2, 3, 11, 12, 13, 14, 15, 16, 17, 1, 2, 3]
    none = [7, 8, 9]
    rows = [
        DraftRequest(row, ids, torch.zeros(4), max_depth=8, max_nodes=9)
        for row, ids in enumerate((long, none))
    ]
    sure, unsure = hybrid.draft(rows), []
    heads.chance = 0.05
    unsure = hybrid.draft(rows)
    for drafts in (sure, unsure):
        assert [len(draft.tree) for draft in drafts] == [9, 9]
        assert set(drafts[1].tree.tokens[1:]) == set(range(100, 108))
        for row, draft in enumerate(drafts):
            assert draft.states is not None
            assert bool((draft.states == row).all())
    assert sure[0].tree.tokens[1:] == (*range(100, 108),), "0.9 each: more than any match"
    assert unsure[0].tree.tokens[1:7] == (11, 12, 13, 14, 15, 16), "a match of three tokens"
    assert [request.max_nodes for request in heads.asked] == [9] * 4


def test_a_shape_without_chances_is_weighed_by_depth() -> None:
    hybrid, heads = drafter()
    heads.chance = None
    ids = [1, 2, 3, 11, 12, 13, 14, 15, 16, 17, 1, 2, 3]
    (draft,) = hybrid.draft([DraftRequest(0, ids, torch.zeros(4), max_depth=8, max_nodes=6)])
    assert draft.tree.tokens[1:3] == (11, 12)
    assert 100 in draft.tree.tokens
    assert draft.chances is not None
    assert draft.chances[draft.tree.tokens.index(100)] == pytest.approx(FIXED_CHANCE)


def test_room_for_the_root_alone_stays_so() -> None:
    hybrid, _ = drafter()
    ids = [1, 2, 3, 4, 1, 2, 3]
    (draft,) = hybrid.draft([DraftRequest(0, ids, None, max_depth=8, max_nodes=1)])
    assert draft.tree.tokens == (3,)


def test_depth_is_kept_and_reset_reaches_both() -> None:
    hybrid, heads = drafter()
    ids = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    (draft,) = hybrid.draft([DraftRequest(0, ids, None, max_depth=1, max_nodes=20)])
    assert max(draft.tree.depths) == 1
    hybrid.reset()
    assert heads.resets == 1
    (draft,) = hybrid.draft([DraftRequest(0, [2, 3], None, max_depth=4, max_nodes=4)])
    assert 4 not in draft.tree.tokens
