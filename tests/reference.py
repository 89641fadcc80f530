"""Slow oracles: short, obviously right, and written without a line of the code that they judge.

Shapes: H heads, K KV heads, N queries, L keys, D and E head dims of keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


class ReferencePages:
    """What a batch of sequences holds: token ids and how many of them are committed. No pages, no slots."""

    def __init__(self, rows: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.committed = [0] * rows

    def append(self, row: int, tokens: Sequence[int]) -> None:
        """Adds tentative tokens; for the content it makes no difference how pages group them."""
        self.tokens[row] = [*self.tokens[row], *tokens]

    append_sets = append

    def commit(self, row: int, accepted: int | Sequence[int]) -> None:
        """Keeps the first `accepted` tentative tokens, or those at these places, and drops the rest."""
        places = range(accepted) if isinstance(accepted, int) else accepted
        old = self.tokens[row][: self.committed[row]]
        drafted = self.tokens[row][self.committed[row] :]
        self.tokens[row] = old + [drafted[place] for place in places]
        self.committed[row] = len(self.tokens[row])

    def truncate(self, row: int, length: int) -> None:
        """Keeps the first `length` tokens."""
        self.tokens[row] = self.tokens[row][:length]
        self.committed[row] = min(self.committed[row], length)

    def reorder(self, rows: Sequence[int]) -> None:
        """Makes the batch rows[0], rows[1], ... of the old one."""
        self.tokens = [list(self.tokens[row]) for row in rows]
        self.committed = [self.committed[row] for row in rows]

    def fork(self, row: int) -> None:
        """Adds a copy of `row`."""
        self.reorder([*range(len(self.tokens)), row])

    def reset(self, rows: int) -> None:
        """Starts again with `rows` empty sequences."""
        self.__init__(rows)


def reference_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    offset: int | None = None,
    hidden: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends in float64, head by head, with keys in token order.

    Args:
        query: [H, N, D].
        keys: [K, L, D].
        values: [K, L, E].
        scaling: factor on q.k.
        window: a query sees itself and the `window - 1` keys before it.
        softcap: scores become softcap * tanh(score / softcap).
        offset: which key is the first query's own; None means that the queries are the last N keys.
        hidden: bool [L] true where no query may look.
        bias: [H or 1, N, L] added to the scores; it then decides alone what is seen.
    Returns:
        [H, N, E] float64; zeros where a query sees nothing.
    """
    heads, count, _ = query.shape
    kv_heads, length, value_dim = values.shape
    first = length - count if offset is None else offset
    behind = torch.arange(first, first + count)[:, None] - torch.arange(length)[None]  # [N, L]
    unseen = behind < 0
    if window is not None:
        unseen = unseen | (behind >= window)
    if hidden is not None:
        unseen = unseen | hidden
    out = torch.zeros(heads, count, value_dim, dtype=torch.float64)
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        scores = query[head].double() @ keys[kv_head].double().T * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is None:
            scores[unseen] = -math.inf
        else:
            scores = scores + bias[head if bias.shape[0] > 1 else 0].double()
        sees = scores.max(-1).values > -math.inf
        weights = torch.exp(scores[sees] - scores[sees].max(-1, keepdim=True).values)
        out[head, sees] = (weights / weights.sum(-1, keepdim=True)) @ values[kv_head].double()
    return out


def reference_bounds(
    keys: torch.Tensor, tokens: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Minimum, maximum and float64 mean [K, D] of keys [K, L, D] at these tokens, one token at a time."""
    lower = upper = keys[:, tokens[0]]
    total = torch.zeros_like(lower, dtype=torch.float64)
    for token in tokens:
        lower = torch.minimum(lower, keys[:, token])
        upper = torch.maximum(upper, keys[:, token])
        total = total + keys[:, token].double()
    return lower, upper, total / len(tokens)
