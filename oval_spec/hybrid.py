"""Two drafters in one tree: what followed the last tokens earlier in the text, and what heads expect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from oval_spec.drafter import Draft, Drafter, DraftRequest
from oval_spec.ngram import NgramDrafter
from oval_spec.token_tree import TokenTree

LONG_SHARE = 2
SHORT_SHARE = 4
"""The n-gram side may have 1 / 2 of the nodes where its match is as long as it looks for, else 1 / 4."""


class HybridDrafter:
    """Merges the trees of an n-gram drafter and of heads within one number of nodes.

    A long match is mostly a text that is being copied: there the n-gram side is right many tokens deep, where heads no
    longer are. Heads fill the rest of the tree, all of it where nothing matches, by their own choice of nodes.
    """

    name = "hybrid"

    def __init__(self, ngram: NgramDrafter, heads: Drafter) -> None:
        self._ngram = ngram
        self._heads = heads

    @property
    def needs_hidden(self) -> bool:
        """Whether the heads need the target's hidden state."""
        return self._heads.needs_hidden

    def reset(self) -> None:
        """Forgets every row."""
        self._ngram.reset()
        self._heads.reset()

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Returns the merged trees, with the states of the heads."""
        found = [self._found(request) for request in requests]
        asked = [
            replace(request, max_nodes=request.max_nodes - len(tree) + 1)
            for request, tree in zip(requests, found, strict=True)
        ]
        return [
            Draft(
                merge_trees(tree, draft.tree, request.max_nodes),
                draft.states,
                draft.in_target_space,
            )
            for request, tree, draft in zip(requests, found, self._heads.draft(asked), strict=True)
        ]

    def _found(self, request: DraftRequest) -> TokenTree:
        tree, length = self._ngram.propose(request)
        share = LONG_SHARE if length == self._ngram.ngram_max else SHORT_SHARE
        # Its nodes are numbered best first.
        return tree.cut(request.max_depth, 1 + (request.max_nodes - 1) // share)


def merge_trees(first: TokenTree, second: TokenTree, max_nodes: int) -> TokenTree:
    """Returns the nodes of `first`, then those paths of `second` that it lacks, while there is room."""
    assert first.tokens[0] == second.tokens[0], "both begin with the row's last token"
    tokens, parents = [first.tokens[0]], [-1]
    merged: dict[tuple[int, int], int] = {}
    for tree in (first, second):
        place = {0: 0}
        for node in range(1, len(tree)):
            parent = place.get(tree.parents[node])
            if parent is None:
                continue
            key = (parent, tree.tokens[node])
            if key not in merged and len(tokens) < max_nodes:
                merged[key] = len(tokens)
                tokens.append(key[1])
                parents.append(parent)
            if key in merged:
                place[node] = merged[key]
    return TokenTree(tuple(tokens), tuple(parents))
