"""A tree of drafted tokens: what one row proposes and one forward verifies. N nodes, the root included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class TokenTree:
    """Tokens that may follow a text, and the text's last token, which is the root.

    Attributes:
        tokens: [N] token of each node; the first is the root's: chosen already, its K and V not cached yet.
        parents: [N] node before each node, always a smaller number; -1 for the root.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents) > 0, "one parent a node"
        assert self.parents[0] == -1, "the root comes first"
        assert all(0 <= p < i for i, p in enumerate(self.parents) if i), "parents come before"
        pairs = list(zip(self.parents, self.tokens, strict=True))[1:]
        assert len(set(pairs)) == len(pairs), "children of a node are different tokens"

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> TokenTree:
        """Returns the tree of one path; tokens[0] is the root's."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Steps from the root to each node, [N]."""
        depths = [0] * len(self)
        for node in range(1, len(self)):
            depths[node] = depths[self.parents[node]] + 1
        return tuple(depths)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node but the last has one child: plain causal order is right then."""
        return self.parents == tuple(range(-1, len(self) - 1))

    @cached_property
    def children(self) -> tuple[dict[int, int], ...]:
        """By node: its children's nodes by token."""
        found: list[dict[int, int]] = [{} for _ in self.tokens]
        for node in range(1, len(self)):
            found[self.parents[node]][self.tokens[node]] = node
        return tuple(found)

    def path(self, node: int) -> tuple[int, ...]:
        """Returns the nodes from the root to `node`, both included, ascending."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def visible(self) -> torch.Tensor:
        """Returns which nodes each node sees, bool [N, N]: itself and those before it on its path."""
        seen = torch.eye(len(self), dtype=torch.bool)
        for node in range(1, len(self)):
            seen[node] |= seen[self.parents[node]]
        return seen

    def cut(self, max_depth: int, max_nodes: int | None = None) -> TokenTree:
        """Returns the nodes of at most this depth, and of these the first `max_nodes`, the root included."""
        kept = [node for node in range(len(self)) if self.depths[node] <= max(0, max_depth)]
        kept = kept if max_nodes is None else kept[: max(1, max_nodes)]
        if len(kept) == len(self):
            return self
        place = {node: i for i, node in enumerate(kept)}
        return TokenTree(
            tuple(self.tokens[node] for node in kept),
            tuple(place.get(self.parents[node], -1) for node in kept),
        )
