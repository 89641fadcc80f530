"""A linear layer for few rows, wherever it may run: the compiled kernel where that is faster, torch elsewhere."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from oval_core.errors import BackendUnavailableError
from oval_core.native.linear import LinearKernel, load_linear


def few_rows_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns x @ weight.T + bias, [..., O]; float32 sums in both ways, so they differ in the last bit at most.

    Args:
        x: [..., I].
        weight: [O, I].
        bias: [O] or None.
    """
    fits = (
        x.is_cpu
        and x.dtype is weight.dtype is torch.bfloat16
        and weight.is_contiguous()
        and x.numel() > 0
        and not torch.is_grad_enabled()
    )
    kernel = _kernel() if fits else None
    if kernel is None or x.numel() // x.shape[-1] not in kernel.rows:
        return F.linear(x, weight, bias)
    return kernel(weight, x.contiguous(), bias)


@functools.cache
def _kernel() -> LinearKernel | None:
    try:
        return load_linear()
    except BackendUnavailableError:  # nobody asked for this kernel by name
        return None
