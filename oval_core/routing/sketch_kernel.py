"""The compiled way to score page sketches, where there is one: bf16 on a CPU, one query a layer."""

from __future__ import annotations

import torch

from oval_core.native import load_kernels, unavailable_reason
from oval_core.routing.key_signals import Sketch


def sketch_scores(
    signal: Sketch, query: torch.Tensor, summaries: torch.Tensor
) -> torch.Tensor | None:
    """Returns what `signal.score` returns, within bf16's rounding; None where no kernel can.

    Args:
        signal: the sketch.
        query: [Y, H, D].
        summaries: [Y, K, P, E], the first P pages of a larger tensor.
    """
    is_bf16 = query.dtype == summaries.dtype == torch.bfloat16
    if not is_bf16 or query.device.type != "cpu" or summaries.device.type != "cpu":
        return None
    if query.ndim != 3 or len(query) != len(summaries) or unavailable_reason() is not None:
        return None  # several queries of one layer
    kernels = load_kernels(query.shape[2], query.shape[1] // summaries.shape[1])
    return kernels.sketch_scores(query, summaries, signal.scaling, signal.most_tokens)
