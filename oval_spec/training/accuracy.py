"""How often draft heads are right on held-out answers, and what trees would gain. N positions, K heads, W ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oval_spec.tree_shape import TreeShape

MISSED = 1 << 20
"""Rank of a token that a head cannot or did not name among its best."""
TREE_SIZES = (3, 7, 15, 31, 63)
"""Drafted nodes, so without the root, that tau is told for."""


def rank_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns how many tokens a head put before the right one, [R]; `MISSED` where the target is negative.

    Among equal logits a target counts as behind, so that what is equal everywhere is never right.

    Args:
        logits: [R, V'].
        targets: draft ids, int64 [R].
    """
    own = logits.gather(1, targets.clamp(min=0)[:, None])
    return ((logits >= own).sum(1) - 1).where(targets >= 0, MISSED)


def accuracy_table(ranks: torch.Tensor, counted: torch.Tensor, width: int) -> list[list[float]]:
    """Returns the share of positions where a head's token of a rank was right, [K][W].

    For sequential heads the ranks must be those on the right path.

    Args:
        ranks: [N, K].
        counted: where there is a token to predict, bool [N, K].
        width: W.
    """
    table = []
    for head in range(ranks.shape[1]):
        own = ranks[counted[:, head], head]
        hits = torch.bincount(own[own < width], minlength=width)
        table.append((hits / max(1, len(own))).tolist())
    return table


def simulated_tau(ranks: torch.Tensor, lengths: Sequence[int], shape: TreeShape) -> float:
    """Returns the tokens a step that greedy verification of a fixed tree emits over whole answers, the bonus included.

    Args:
        ranks: [N, K], answers one after another.
        lengths: positions of each answer.
        shape: the tree.
    """
    paths = set(shape.by_value)
    steps = emitted = start = 0
    rows = ranks.tolist()
    for length in lengths:
        place = 0
        while place < length:
            taken: tuple[int, ...] = ()
            for rank in rows[start + place]:
                if (*taken, rank) not in paths:
                    break
                taken = (*taken, rank)
            steps += 1
            emitted += min(len(taken) + 1, length - place)
            place += len(taken) + 1
        start += length
    return emitted / max(1, steps)
