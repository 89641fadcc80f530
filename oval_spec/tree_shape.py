"""The shape of a tree of heads: which ranks of which head become nodes. It knows no tokens. N nodes with the root.

A path (a, b, c) is rank a of head 0, then rank b of head 1, then rank c of head 2. The root has no path; node i + 1 is
`paths[i]`. Numbers of nodes always count the root.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from oval_core.errors import ConfigError
from oval_spec.token_tree import TokenTree

TOPK = 10
"""Ranks that a head offers: Medusa's buffers count with it, so a shape may not go beyond."""

Path = tuple[int, ...]


@dataclass(frozen=True)
class TreeShape:
    """Paths of ranks without gaps along a path.

    Attributes:
        by_value: the paths, most valuable first; each comes after those it goes through.
    """

    by_value: tuple[Path, ...]

    def __post_init__(self) -> None:
        seen: set[Path] = {()}
        for path in self.by_value:
            if not path or not all(_is_rank(rank) for rank in path):
                raise ConfigError(
                    f"tree: got the path {path!r}. Allowed: one or more ranks from 0 to {TOPK - 1}. Correct it."
                )
            if path in seen:
                raise ConfigError(f"tree: got the path {path} twice. Allowed: once. Drop one.")
            if path[:-1] not in seen:
                raise ConfigError(
                    f"tree: got the path {path} before {path[:-1]}. Allowed: paths whose beginnings are in the tree, "
                    "in front of them. Add that one."
                )
            seen.add(path)

    @classmethod
    def of(cls, paths: Iterable[Sequence[int]]) -> TreeShape:
        """Builds a shape from `medusa_choices`: lists of ranks in any order, the earlier the more valuable."""
        given: list[Path] = []
        for path in paths:
            if not isinstance(path, Sequence):
                raise ConfigError(
                    f"tree: got {path!r} among its paths. Allowed: lists of ranks, such as [0, 2]. (Medusa 0.1 listed "
                    "numbers of ranks by head; write its full tree out as paths.)"
                )
            given.append(tuple(path))
        known = set(given)
        if len(known) < len(given):
            double = next(path for i, path in enumerate(given) if path in given[:i])
            raise ConfigError(f"tree: got the path {double} twice. Allowed: once. Drop one.")
        # What a path goes through is worth at least as much: it moves in front of it.
        order: dict[Path, None] = {}
        for path in given:
            beginnings = (path[:depth] for depth in range(1, len(path)))
            order.update(dict.fromkeys(head for head in beginnings if head in known))
            order[path] = None
        return cls(tuple(order))

    @classmethod
    def from_parents(cls, parents: Iterable[int]) -> TreeShape:
        """Builds a shape from each new node's parent, the root being 0: a node takes its parent's next free rank."""
        order: list[Path] = [()]
        taken: dict[Path, int] = {}
        for parent in parents:
            if not 0 <= parent < len(order):
                raise ConfigError(
                    f"tree: got parent {parent} for node {len(order)}. Allowed: 0 to {len(order) - 1}. Correct it."
                )
            above = order[parent]
            rank = taken.get(above, 0)
            taken[above] = rank + 1
            order.append((*above, rank))
        return cls(tuple(order[1:]))

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """The paths by length, then by ranks: the order of the nodes after the root."""
        return tuple(sorted(self.by_value, key=lambda path: (len(path), path)))

    @property
    def num_nodes(self) -> int:
        """Nodes, the root included."""
        return len(self.by_value) + 1

    @cached_property
    def depth(self) -> int:
        """Length of the longest path: heads that the shape asks."""
        return max(map(len, self.by_value), default=0)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Node before each node, [N]; -1 for the root."""
        place = {path: node for node, path in enumerate(((), *self.paths))}
        return (-1, *(place[path[:-1]] for path in self.paths))

    @cached_property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each node's children, ascending, by node [N]: the largest says how many tokens a node needs."""
        found: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for parent, path in zip(self.parents[1:], self.paths, strict=True):
            found[parent].append(path[-1])
        return tuple(map(tuple, found))

    def first(self, num_nodes: int) -> TreeShape:
        """Returns the shape of the most valuable nodes, at most so many, the root included."""
        return TreeShape(self.by_value[: max(0, num_nodes - 1)])

    def cut(self, max_depth: int) -> TreeShape:
        """Returns the nodes of at most this depth, as for fewer heads."""
        return TreeShape(tuple(path for path in self.by_value if len(path) <= max_depth))

    def fill(self, root: int, ranked: Sequence[Sequence[int]]) -> TokenTree:
        """Returns the tree of tokens.

        Args:
            root: token of the root.
            ranked: by node [N]: different tokens that may follow it, best first. Nodes without children need none.
        """
        return self._filled(root, ranked, range(self.num_nodes))

    def fill_levels(self, root: int, ranked: Sequence[Sequence[int]]) -> TokenTree:
        """Returns the tree of tokens where heads are independent: ranked [depth, ranks] is the same along every path."""
        return self._filled(root, ranked, [0, *map(len, self.paths)])

    def _filled(
        self, root: int, ranked: Sequence[Sequence[int]], source: Sequence[int]
    ) -> TokenTree:
        tokens = [root]
        for parent, path in zip(self.parents[1:], self.paths, strict=True):
            tokens.append(int(ranked[source[parent]][path[-1]]))
        return TokenTree(tuple(tokens), self.parents)

    def medusa_buffers(self, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Returns what `generate_medusa_buffers` of Medusa returns, under its names.

        `medusa_attn_mask` [1, 1, N, N], 1 where a node sees another; `tree_indices` [N], place of each node's token in
        the root and TOPK tokens of each head in a row; `medusa_position_ids` [N], depths; `retrieve_indices`
        [leaves, depth + 1], nodes from the root to each leaf, last leaf first, padded with -1.
        """
        tree = TokenTree(tuple(range(self.num_nodes)), self.parents)
        inner = set(self.parents)
        leaves = [tree.path(node) for node in reversed(range(self.num_nodes)) if node not in inner]
        places = [path[-1] + TOPK * (len(path) - 1) + 1 for path in self.paths]
        rows = [[*nodes, *[-1] * (self.depth + 1 - len(nodes))] for nodes in leaves]
        buffers = {
            "medusa_attn_mask": tree.visible().float()[None, None],
            "tree_indices": torch.tensor([0, *places]),
            "medusa_position_ids": torch.tensor(tree.depths),
            "retrieve_indices": torch.tensor(rows),
        }
        return {name: value.to(device) for name, value in buffers.items()}


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < TOPK
