"""The paths that heads are run along, in one batch: what each carries, and its next token. Shapes as in `drafter.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oval_spec.drafter import DraftRequest
from oval_spec.heads.base import DraftHeads


class Paths:
    """B rows with F paths each, all of one length. Where heads are independent, a row has one path that all share."""

    def __init__(self, heads: DraftHeads, requests: Sequence[DraftRequest], depth: int) -> None:
        """Begins one path a row, at its root.

        Args:
            heads: bound.
            requests: with hidden states.
            depth: heads that will be asked.
        """
        self.heads = heads
        self.num_rows = len(requests)
        states = []
        for request in requests:
            assert request.hidden is not None, "this drafter needs hidden states"
            states.append(request.hidden)
        W = heads.context
        tokens, lacking = _last_tokens(requests, W + 1)
        embedded = heads.embed(tokens.to(heads.device))  # [B, W + 1, C]
        if lacking is not None:
            embedded = embedded.masked_fill(lacking[..., None].to(embedded.device), 0)
        self._carried = heads.start(torch.stack(states), embedded[:, :W])
        self._next = embedded[:, W]
        self._at_once: torch.Tensor | None = None
        if not heads.is_sequential and heads.shares_lm_head:
            # The LM head is read once for all heads: that is most of what drafting costs.
            self._states = torch.stack([heads.read(self._carried, k) for k in range(depth)], 1)
            self._at_once = heads.logits(self._states, 0).float()

    def step(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Goes on by the next token; returns head k's states [B * F, C] and logits [B * F, V'], float32."""
        if self._at_once is not None:
            return self._states[:, k], self._at_once[:, k]
        self._carried = self.heads.step(self._carried, self._next, k)
        states = self.heads.read(self._carried, k)
        return states, self.heads.logits(states, k).float()

    def first(self, states: torch.Tensor) -> torch.Tensor:
        """Returns the states of each row's first path, [B, C], from those of all, [B * F, C]."""
        return states.view(self.num_rows, -1, states.shape[-1])[:, 0]

    def follow(self, parents: torch.Tensor, tokens: torch.Tensor) -> None:
        """Chooses the next paths: the path `parents` [B, F'] of the row, and after it `tokens` [B, F']."""
        if not self.heads.is_sequential:
            return
        wide = self._carried.view(self.num_rows, -1, self._carried.shape[-1])
        if wide.shape[1] == 1:
            chosen = wide.expand(-1, parents.shape[1], -1)
        else:
            chosen = wide.gather(1, parents[..., None].expand(-1, -1, wide.shape[-1]))
        self._carried = chosen.reshape(-1, wide.shape[-1])
        self._next = self.heads.embed(tokens).flatten(0, 1)


def _last_tokens(
    requests: Sequence[DraftRequest], count: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the last `count` tokens of each row [B, count], and which of them a short text lacks; None if none."""
    rows = [list(request.ids[-count:]) for request in requests]
    shortest = min(map(len, rows))
    tokens = torch.tensor([[0] * (count - len(row)) + row for row in rows])
    if shortest == count:
        return tokens, None
    lengths = torch.tensor([len(row) for row in rows])
    return tokens, torch.arange(count)[None] < (count - lengths)[:, None]
