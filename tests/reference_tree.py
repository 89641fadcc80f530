"""Slow oracles of token trees: random trees, and attention of each node over its text and its own path alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from oval_core.values import LayerSpec


class RandomTree:
    """N nodes, each with a random earlier node before it; node 0 is the root."""

    def __init__(self, num_nodes: int, rng: random.Random) -> None:
        self.parents = [-1, *(rng.randrange(node) for node in range(1, num_nodes))][:num_nodes]

    def __len__(self) -> int:
        return len(self.parents)

    def path(self, node: int) -> list[int]:
        """Nodes from the root to this one, ascending."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def seen(self) -> torch.Tensor:
        """bool [N, N] which nodes each one sees."""
        seen = torch.zeros(len(self), len(self), dtype=torch.bool)
        for node in range(len(self)):
            seen[node, self.path(node)] = True
        return seen


def path_attention(
    tree: RandomTree,
    query: torch.Tensor,
    old: tuple[torch.Tensor, torch.Tensor],
    new: tuple[torch.Tensor, torch.Tensor],
    spec: LayerSpec,
) -> torch.Tensor:
    """Attention of each node as if its path had followed the text, float64 [N, H, E].

    query [H, N, D]; old keys and values [K, L, D] of the text; new ones [K, N, D] of the nodes.
    """
    rows: list[torch.Tensor] = []
    for node in range(len(tree)):
        path = tree.path(node)
        keys, values = (
            torch.cat([past, own[:, path]], 1).double() for past, own in zip(old, new, strict=True)
        )
        group = query.shape[0] // keys.shape[0]
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        scores = torch.einsum("hd,hld->hl", query[:, node].double(), keys) * spec.scaling
        if spec.softcap is not None:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        if spec.window is not None:
            scores[:, : max(0, scores.shape[1] - spec.window)] = float("-inf")
        rows.append(torch.einsum("hl,hle->he", scores.softmax(-1), values))
    return torch.stack(rows)


def accepted_paths(trees: Sequence[RandomTree], rng: random.Random) -> list[list[int]]:
    """Places to accept in each row: a random path, or now and then none."""
    return [
        tree.path(rng.randrange(len(tree))) if len(tree) and rng.random() < 0.9 else []
        for tree in trees
    ]
