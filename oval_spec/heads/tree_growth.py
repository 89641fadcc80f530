"""Grows token trees by probability, a level at a time, and keeps the likeliest nodes. It knows no heads.

Shapes: B rows, F frontier nodes a row, J children a node, N' candidates a row. The frontier: nodes that get children next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oval_spec.token_tree import TokenTree


@dataclass(frozen=True, slots=True)
class Frontier:
    """Nodes that get children next, likeliest first.

    Attributes:
        parents: place of each one's parent in the frontier before, [B, F].
        tokens: [B, F].
    """

    parents: torch.Tensor
    tokens: torch.Tensor


class Growth:
    """Candidates of B trees; each is a child of a frontier node, and the root is the first frontier."""

    def __init__(self, num_rows: int, max_frontier: int, device: torch.device) -> None:
        self._most = max_frontier
        self._scores: list[torch.Tensor] = []
        self._tokens: list[torch.Tensor] = []
        self._parents: list[torch.Tensor] = []
        self._reached = torch.zeros(num_rows, 1, device=device)  # log-probability of the frontier
        # Candidate number of each frontier node; -1 is the root.
        self._numbers = torch.full((num_rows, 1), -1, device=device)
        self._ends: list[int] = []  # candidates up to and with each level

    def add(self, scores: torch.Tensor, tokens: torch.Tensor) -> Frontier:
        """Adds a level and returns the next frontier.

        Args:
            scores: log-probabilities of the children of each frontier node, [B * F, J], float32; or [B, J] where
                all nodes of a row have the same.
            tokens: their target ids, same shape.
        """
        B, F = self._numbers.shape
        J = scores.shape[-1]
        # Rounding can leave log-probabilities above 0: a child must never look likelier than its parent.
        sums = self._reached[..., None] + scores.view(B, -1, J).clamp(max=0)
        sums = sums.view(B, F * J).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        tokens = tokens.view(B, -1, J).expand(B, F, J).reshape(B, F * J)
        parents = self._numbers[..., None].expand(B, F, J).reshape(B, F * J)
        self._scores.append(sums)
        self._tokens.append(tokens)
        self._parents.append(parents)
        start = self._ends[-1] if self._ends else 0
        self._ends.append(start + F * J)
        self._reached, places = sums.topk(min(self._most, F * J), -1)
        self._numbers = places + start
        return Frontier(places // J, tokens.gather(1, places))

    def mass(self) -> float:
        """Returns the probability that the right path leads through the frontier, by the row that is surest."""
        return float(self._reached.exp().sum(-1).max())

    def trees(
        self, roots: Sequence[int], max_nodes: Sequence[int], max_depths: Sequence[int]
    ) -> list[tuple[TokenTree, tuple[float, ...]]]:
        """Returns each row's tree of its likeliest candidates, likeliest first, and the probability of each node.

        Args:
            roots: token of each root.
            max_nodes: nodes of each tree, the root included.
            max_depths: depth of each tree.
        """
        # Stable: among equals the parent, which is the earlier one, stays in front.
        sums, order = torch.cat(self._scores, 1).sort(dim=-1, descending=True, stable=True)
        chances = sums.exp().tolist()
        tokens = torch.cat(self._tokens, 1).tolist()
        parents = torch.cat(self._parents, 1).tolist()
        trees = []
        for row, numbers in enumerate(order.tolist()):
            end = self._ends[min(max_depths[row], len(self._ends)) - 1]
            node_of = {-1: 0}
            kept, before, likely = [roots[row]], [-1], [1.0]
            for number, chance in zip(numbers, chances[row], strict=True):
                if len(kept) == max_nodes[row]:
                    break
                if number < end:  # of a level within the depth
                    node_of[number] = len(kept)
                    kept.append(tokens[row][number])
                    before.append(node_of[parents[row][number]])
                    likely.append(chance)
            trees.append((TokenTree(tuple(kept), tuple(before)), tuple(likely)))
        return trees
