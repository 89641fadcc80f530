"""Finds the tree that is worth most: once from measured accuracies, or at each step from probabilities. N nodes.

Both rest on one fact: a node is worth at most its parent, so that the most valuable nodes are a tree by themselves.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from oval_core.errors import ConfigError
from oval_spec.token_tree import TokenTree
from oval_spec.tree_shape import TOPK, Path, TreeShape

Accuracy = Sequence[Sequence[float]]
"""[heads, ranks]: share of texts whose token at that distance is the one that a head ranks so."""


def search_tree(accuracy: Accuracy, num_nodes: int) -> TreeShape:
    """Returns the tree of at most `num_nodes` nodes, the root included, that accepts most.

    As Medusa's search does, it takes heads as independent: a path is right with the product of its accuracies. Starting
    from the root it adds the best node that can be added, one at a time, so that `first` of the result is the best
    smaller tree. Equal nodes: the shorter path first, then the lower ranks.
    """
    _check(accuracy)
    # A head's ranks by their accuracy: they rarely differ from 0, 1, 2, but then the next sibling is the next best.
    ranked = [
        sorted(range(min(len(row), TOPK)), key=lambda rank, row=row: -row[rank])  # type: ignore[misc]
        for row in accuracy
    ]
    heap: list[tuple[float, int, Path, int]] = []

    def offer(above: Path, worth: float, place: int) -> None:
        depth = len(above)
        if depth < len(ranked) and place < len(ranked[depth]):
            rank = ranked[depth][place]
            value = worth * accuracy[depth][rank]
            heapq.heappush(heap, (-value, depth + 1, (*above, rank), place))

    worth: dict[Path, float] = {(): 1.0}
    offer((), 1.0, 0)
    while heap and len(worth) < num_nodes:
        value, _, path, place = heapq.heappop(heap)
        worth[path] = -value
        offer(path[:-1], worth[path[:-1]], place + 1)
        offer(path, -value, 0)
    return TreeShape(tuple(worth)[1:])


def expected_tau(shape: TreeShape, accuracy: Accuracy) -> float:
    """Returns the tokens that a step emits on average: 1 and the product of accuracies along every path."""
    return tau_by_nodes(shape, accuracy)[-1]


def tau_by_nodes(shape: TreeShape, accuracy: Accuracy) -> list[float]:
    """Returns what each `shape.first(n)` emits on average, for n = 1 to N: entry n - 1."""
    _check(accuracy)
    worth: dict[Path, float] = {(): 1.0}
    tau = [1.0]
    for path in shape.by_value:
        known = len(path) <= len(accuracy) and path[-1] < len(accuracy[len(path) - 1])
        right = accuracy[len(path) - 1][path[-1]] if known else 0.0
        worth[path] = worth[path[:-1]] * right
        tau.append(tau[-1] + worth[path])
    return tau


class Frontier(NamedTuple):
    """Nodes whose children are asked for: F of them, all of one depth k, of several rows.

    Attributes:
        rows: long [F] row that each belongs to.
        parents: long [F] place of each one's parent in the frontier before; its own place in the first one.
        paths: long [F, k + 1] tokens from the root to each.
    """

    rows: torch.Tensor
    parents: torch.Tensor
    paths: torch.Tensor


Expand = Callable[[Frontier], tuple[torch.Tensor, torch.Tensor]]
"""Returns different tokens that may follow each node, long [F, R], and the log of their probabilities, [F, R]."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    value: float
    parent: int
    token: int


def grow_trees(
    roots: Sequence[int],
    expand: Expand,
    num_nodes: Sequence[int],
    max_depth: Sequence[int],
    width: int | None = None,
) -> list[TokenTree]:
    """Returns each row's most probable nodes, as EAGLE-2 grows its trees, for heads that see what was drafted.

    Level by level, `expand` is asked about the nodes that can still have a child among the most probable; all rows go
    in one call. Where `width` is None the result is exactly the best tree.

    Args:
        roots: token of each row's root.
        expand: gives children and their log probabilities, given the path.
        num_nodes: nodes of each row's tree, the root included.
        max_depth: greatest depth of each row's nodes.
        width: nodes of a row that are expanded at one depth; None for all that could matter.
    """
    grown = [[_Candidate(0.0, -1, root)] for root in roots]
    levels: list[list[int]] = [
        [0] if nodes > 1 and deep > 0 else []
        for nodes, deep in zip(num_nodes, max_depth, strict=True)
    ]
    paths = torch.tensor(list(roots), dtype=torch.long)[:, None]
    before = {(row, 0): row for row in range(len(roots))}  # place of a node in the last frontier
    depth = 0
    while any(levels):
        asked = [(row, node) for row, level in enumerate(levels) for node in level]
        frontier = _frontier(asked, grown, before, paths, depth)
        tokens, log_probs = expand(frontier)
        answers = zip(asked, tokens.tolist(), log_probs.double().tolist(), strict=True)
        start = [len(row) for row in grown]
        for (row, node), children, logs in answers:
            value = grown[row][node].value
            # Rounding may leave a log above 0; a child must not be worth more than its parent.
            grown[row] += [
                _Candidate(value + min(log, 0.0), node, token)
                for token, log in zip(children, logs, strict=True)
                if log > -math.inf
            ]
        before, paths, depth = {key: i for i, key in enumerate(asked)}, frontier.paths, depth + 1
        levels = [
            _worth_expanding(grown[row], start[row], num_nodes[row], width)
            if depth < max_depth[row]
            else []
            for row in range(len(roots))
        ]
    return [_tree(*row) for row in zip(grown, num_nodes, strict=True)]


def _frontier(
    asked: list[tuple[int, int]],
    grown: list[list[_Candidate]],
    before: dict[tuple[int, int], int],
    paths: torch.Tensor,
    depth: int,
) -> Frontier:
    rows = torch.tensor([row for row, _ in asked])
    if not depth:
        return Frontier(rows, torch.arange(len(asked)), paths[rows])
    nodes = [(row, grown[row][node]) for row, node in asked]
    parents = torch.tensor([before[row, node.parent] for row, node in nodes])
    last = torch.tensor([[node.token] for _, node in nodes])
    return Frontier(rows, parents, torch.cat([paths[parents], last], dim=1))


def _best(grown: list[_Candidate], count: int) -> list[int]:
    # Equal nodes: the shallower, then the one found first, whose parents were found before it.
    return heapq.nsmallest(count, range(len(grown)), key=lambda i: (-grown[i].value, i))


def _worth_expanding(
    grown: list[_Candidate], start: int, num_nodes: int, width: int | None
) -> list[int]:
    # A node that is not among the best now never has a descendant there.
    new = [node for node in _best(grown, num_nodes) if node >= start]
    return new if width is None else new[:width]


def _tree(grown: list[_Candidate], num_nodes: int) -> TokenTree:
    kept = sorted(_best(grown, max(1, num_nodes)))
    place = {node: i for i, node in enumerate(kept)}
    return TokenTree(
        tuple(grown[node].token for node in kept),
        tuple(place.get(grown[node].parent, -1) for node in kept),
    )


def _check(accuracy: Accuracy) -> None:
    for row in accuracy:
        for value in row:
            if not 0 <= value <= 1:
                raise ConfigError(
                    f"accuracy: got {value!r}. Allowed: shares from 0 to 1, by head and rank. Measure them again."
                )
