"""Two drafters in one tree: what followed the last tokens earlier in the text, and what heads expect."""

from __future__ import annotations

from collections.abc import Sequence

from oval_spec.drafter import Draft, Drafter, DraftRequest
from oval_spec.ngram import NgramDrafter
from oval_spec.token_tree import TokenTree

__all__ = ["HybridDrafter", "merge_trees"]

Path = tuple[int, ...]

FIXED_CHANCE = 0.3
"""What a node of heads is held to bring at each depth where its tree has a fixed shape, so that nobody reckoned it."""


class HybridDrafter:
    """Merges the trees of an n-gram drafter and of heads within one number of nodes.

    Both say how likely each node is, so the likeliest of all are taken: where a text is being copied the n-gram side is
    right many tokens deep, where heads no longer are; where nothing matches all nodes are the heads'.
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
        merged = []
        for request, draft in zip(requests, self._heads.draft(requests), strict=True):
            found = self._ngram.find(request)
            chances = draft.chances or _by_depth(draft.tree)
            tree, both = merge_trees(
                (found.tree, found.chances), (draft.tree, chances), request.max_nodes
            )
            merged.append(Draft(tree, draft.states, draft.in_target_space, both))
        return merged


def merge_trees(
    first: tuple[TokenTree, Sequence[float]],
    second: tuple[TokenTree, Sequence[float]],
    max_nodes: int,
) -> tuple[TokenTree, tuple[float, ...]]:
    """Returns the likeliest nodes of two trees, likeliest first, and how likely each is.

    A path that both propose is taken to fail only where both guesses fail, as if they were independent: 1 - (1 - p)(1 - q).

    Args:
        first: a tree and the probability of each of its nodes, none above its parent's.
        second: another with the same root.
        max_nodes: nodes of the tree, the root included.
    """
    roots = {tree.tokens[0] for tree, _ in (first, second)}
    assert len(roots) == 1, "both begin with the row's last token"
    missed: dict[Path, float] = {}
    for tree, chances in (first, second):
        paths: list[Path] = [()]
        for node in range(1, len(tree)):
            path = (*paths[tree.parents[node]], tree.tokens[node])
            paths.append(path)
            missed[path] = missed.get(path, 1.0) * (1 - chances[node])
    # Of equals the shorter path, so that a node's parent stays in front of it.
    best = sorted(missed, key=lambda path: (missed[path], len(path)))[: max(0, max_nodes - 1)]
    place = {path: i for i, path in enumerate([(), *best])}
    tree = TokenTree(
        (roots.pop(), *(path[-1] for path in best)), (-1, *(place[path[:-1]] for path in best))
    )
    return tree, (1.0, *(1 - missed[path] for path in best))


def _by_depth(tree: TokenTree) -> tuple[float, ...]:
    return tuple(FIXED_CHANCE**depth for depth in tree.depths)
