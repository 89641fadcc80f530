"""Linear layers of draft heads: they run on a handful of rows, between two forwards of the target."""

from __future__ import annotations

import torch
from torch import nn

from oval_core.native.few_rows import few_rows_linear


class HeadLinear(nn.Linear):
    """An `nn.Linear` that goes through the compiled kernel where heads serve in bf16 on a CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [..., O] from x [..., I]."""
        return few_rows_linear(x, self.weight, self.bias)
