"""A linear layer that is frozen, with a trained change of low rank (LoRA, arXiv 2106.09685)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class LoRALinear(nn.Module):
    """y = W x + b + (alpha / r) B A x, W frozen at its random start; B is zero at first.

    The article's second layer of the routing head: `r` (in + out) trained numbers in place of in * out.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        r: int = 4,
        lora_alpha: float = 8.0,
        lora_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        base = torch.empty(out_features, in_features)
        nn.init.kaiming_uniform_(base, a=5**0.5)
        self.register_buffer("weight", base)
        self.bias = nn.Parameter(torch.zeros(out_features))
        self.lora_a = nn.Parameter(torch.empty(r, in_features))
        self.lora_b = nn.Parameter(torch.zeros(out_features, r))
        nn.init.kaiming_uniform_(self.lora_a, a=5**0.5)
        self.scale = lora_alpha / r
        self.dropout = nn.Dropout(lora_dropout)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns [..., out] for inputs [..., in]."""
        weight: torch.Tensor = self.get_buffer("weight")
        low = F.linear(self.dropout(inputs), self.lora_a)
        return F.linear(inputs, weight, self.bias) + self.scale * F.linear(low, self.lora_b)
