"""Loss of draft heads over a draft vocabulary, computed in tiles with its gradient. R rows, C size, V' vocabulary, S kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Tick = Callable[[str, int, int], None]
"""Told what was done, how many of how many."""
TILE = 128
"""Rows whose logits exist at once: 2 MB at 8192 tokens in bfloat16, what a core's own cache holds."""


@dataclass(frozen=True, slots=True)
class SoftTargets:
    """The target's own distribution over its likeliest tokens of the draft vocabulary, for each position.

    Attributes:
        ids: draft ids, int32 [N, S].
        shares: their probabilities, made to sum to 1, float16 [N, S].
    """

    ids: torch.Tensor
    shares: torch.Tensor

    def at(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ids and shares of these positions, [R, S] each, for places [R]."""
        return self.ids[places], self.shares[places]


@torch.no_grad()
def soft_targets(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kept: int, tick: Tick
) -> SoftTargets:
    """Returns what the target itself expects at each position.

    Args:
        hidden: [N, C].
        weight: the LM head's rows of the draft vocabulary, [V', C].
        bias: [V'] or None.
        kept: S.
        tick: told now and then.
    """
    ids, shares = [], []
    for start in range(0, len(hidden), TILE):
        tile = hidden[start : start + TILE].to(weight.dtype)
        logits = F.linear(tile, weight, bias).float()
        best = logits.topk(min(kept, len(weight)), dim=-1)
        ids.append(best.indices.int())
        shares.append(best.values.softmax(-1).half())
        tick("soft targets", start + len(tile), len(hidden))
    return SoftTargets(torch.cat(ids), torch.cat(shares))


def draft_loss(
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    row_weights: torch.Tensor,
    soft: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Returns the weighted sum of the rows' cross-entropies, float32.

    The logits are never all in memory and are computed once, for loss and gradient together; the LM head is frozen.

    Args:
        states: what the LM head is applied to, [R, C].
        weight: its rows of the draft vocabulary, [V', C].
        bias: [V'] or None.
        targets: draft ids, int64 [R].
        row_weights: [R].
        soft: draft ids and shares, [R, S] each, in place of the targets.
    """
    ids, shares = (
        soft if soft is not None else (targets[:, None], torch.ones_like(targets[:, None]))
    )
    loss: torch.Tensor = _TiledCrossEntropy.apply(states, weight, bias, ids, shares, row_weights)
    return loss


class _TiledCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ids: torch.Tensor,
        shares: torch.Tensor,
        row_weights: torch.Tensor,
    ) -> torch.Tensor:
        gradient = torch.empty_like(states)
        total = torch.zeros((), device=states.device)
        for start in range(0, len(states), TILE):
            rows = slice(start, start + TILE)
            own, share, scale = ids[rows].long(), shares[rows].float(), row_weights[rows].float()
            delta = F.linear(states[rows].to(weight.dtype), weight, bias).softmax(1)
            said = delta.gather(1, own).float().clamp(min=torch.finfo(torch.float32).tiny)
            total -= (scale * (share * said.log()).sum(1)).sum()
            # d loss / d logits = scale * (softmax - share)
            delta.scatter_add_(1, own, -share.to(delta.dtype))
            delta.mul_(scale[:, None].to(delta.dtype))
            gradient[rows] = (delta @ weight).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0].to(gradient.dtype), None, None, None, None, None
