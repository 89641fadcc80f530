"""Medusa's heads: K independent heads on the hidden state, each some residual layers, then the LM head. Shapes: `base.py`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from oval_core.errors import ConfigError
from oval_spec.heads.base import DraftHeads, check_whole
from oval_spec.heads.linear import HeadLinear
from oval_spec.heads.vocabulary import DraftVocabulary


class ResBlock(nn.Module):
    """x + SiLU(W x + b). W begins as zero and b does not, so it begins near the identity, as upstream's does."""

    def __init__(self, hidden_size: int, has_bias: bool = True) -> None:
        super().__init__()
        self.linear = HeadLinear(hidden_size, hidden_size, bias=has_bias)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the same shape, [..., C]."""
        return x + F.silu(self.linear(x))


class MedusaHeads(DraftHeads):
    """Independent heads: head k sees the hidden state alone, so every path of a row gets the same tokens from it.

    The layers of a head are modules of their own. Upstream builds `[ResBlock(H)] * L`, one module saved L times;
    such files read as L equal layers, which compute the same.
    """

    kind = "medusa"
    is_sequential = False

    def __init__(
        self,
        num_heads: int,
        hidden_size: int,
        *,
        num_layers: int = 1,
        has_bias: bool = True,
        own_lm_heads: int = 0,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        """Builds untrained heads.

        Args:
            num_heads: K.
            hidden_size: C.
            num_layers: residual layers a head; 0 only with own LM heads.
            has_bias: whether their linear layers have one.
            own_lm_heads: rows of an LM head of each head's own, V'; 0 to share the base's.
            vocabulary: tokens that are drafted; None for all.
        """
        super().__init__(num_heads, hidden_size, vocabulary)
        check_whole("own_lm_heads", own_lm_heads, least=0)
        check_whole("num_layers", num_layers, least=0 if own_lm_heads else 1)
        if own_lm_heads and vocabulary is not None and own_lm_heads != len(vocabulary):
            raise ConfigError(
                f"draft heads: got own LM heads of {own_lm_heads} rows with {len(vocabulary)} draft tokens. Allowed: as "
                "many rows as draft tokens. Set own_lm_heads to that number."
            )
        self.num_layers, self.has_bias, self.own_lm_heads = num_layers, has_bias, own_lm_heads
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResBlock(hidden_size, has_bias) for _ in range(num_layers)))
            for _ in range(num_heads)
        )
        self.lm_heads = nn.ModuleList(
            HeadLinear(hidden_size, own_lm_heads, bias=False)
            for _ in range(num_heads if own_lm_heads else 0)
        )

    def settings(self) -> dict[str, Any]:
        """See `DraftHeads`."""
        names = ("num_heads", "hidden_size", "num_layers", "has_bias", "own_lm_heads")
        return {name: getattr(self, name) for name in names}

    @torch.no_grad()
    def copy_lm_head(self) -> None:
        """Sets each own LM head to the base's rows, where training begins. Needs `bind`."""
        rows, _ = self.lm_head_rows()
        for head in self.lm_heads:
            assert isinstance(head, nn.Linear), "built above"
            head.weight.copy_(rows)

    def start(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:  # noqa: ARG002  it sees no tokens
        """Returns the hidden state, [R, C]."""
        return hidden.to(self.dtype)

    def step(self, carried: torch.Tensor, embedding: torch.Tensor, k: int) -> torch.Tensor:  # noqa: ARG002
        """Returns the hidden state as it was, [R, C]."""
        return carried

    def read(self, carried: torch.Tensor, k: int) -> torch.Tensor:
        """Returns [R, C]."""
        states: torch.Tensor = self.blocks[k](carried)
        return states

    def logits(self, states: torch.Tensor, k: int) -> torch.Tensor:
        """Returns [..., V'], by head k's own LM head if it has one."""
        if not self.own_lm_heads:
            return super().logits(states, k)
        logits: torch.Tensor = self.lm_heads[k](states)
        return logits

    @property
    def shares_lm_head(self) -> bool:
        """See `DraftHeads`."""
        return not self.own_lm_heads
