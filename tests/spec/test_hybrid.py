"""Two trees in one: no path twice, none that lacks its beginning, the heads' states kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_spec import token_paths

from oval_spec.drafter import Draft, DraftRequest
from oval_spec.hybrid import HybridDrafter, merge_trees
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


@settings(deadline=None, derandomize=True)
@given(trees(), trees(), st.integers(1, 20))
def test_the_merged_tree_has_both_trees_paths(
    first: TokenTree, second: TokenTree, nodes: int
) -> None:
    merged = token_paths(merge_trees(first, second, nodes))
    expected = list(token_paths(first))
    expected += [path for path in token_paths(second) if path not in expected]
    assert len(set(merged)) == len(merged)
    assert len(merged) == min(nodes, len(expected))
    assert set(merged) <= set(expected)
    assert merged[: len(first)] == expected[: min(nodes, len(first))]


class Heads:
    """Drafts as many children of the root as it may, one below the other's; remembers what it was asked."""

    name = "heads"
    needs_hidden = True

    def __init__(self) -> None:
        self.asked: list[DraftRequest] = []
        self.resets = 0

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
            )
            for request in requests
        ]


def drafter() -> tuple[HybridDrafter, Heads]:
    heads = Heads()
    return HybridDrafter(NgramDrafter(ngram_max=3, ngram_min=2, depth=8), heads), heads


def test_a_long_match_gets_half_a_short_one_a_quarter() -> None:
    hybrid, heads = drafter()
    assert hybrid.needs_hidden
    long = [1, 2, 3, 11, 12, 13, 14, 15, 16, 17, 1, 2, 3]
    short = [0, 2, 3, 11, 12, 13, 14, 15, 16, 17, 1, 2, 3]
    none = [7, 8, 9]
    rows = [
        DraftRequest(row, ids, torch.zeros(4), max_depth=8, max_nodes=9)
        for row, ids in enumerate((long, short, none))
    ]
    drafts = hybrid.draft(rows)
    assert [len(draft.tree) for draft in drafts] == [9, 9, 9]
    assert drafts[0].tree.tokens[1:5] == (11, 12, 13, 14)
    assert drafts[1].tree.tokens[1:4] == (11, 12, 100)
    assert drafts[2].tree.tokens[1] == 100
    assert [request.max_nodes for request in heads.asked] == [5, 7, 9]
    for row, draft in enumerate(drafts):
        assert draft.states is not None
        assert bool((draft.states == row).all())


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
