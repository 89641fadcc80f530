"""Attention over parts of the keys, merged exactly by log-sum-exp.

softmax over all keys = sum over parts of softmax(part) * exp(lse(part)) / sum of exp(lse). The same identity
is used by FlashDecoding and PRR (arXiv 2606.30389). Shapes: B batch, H heads, N queries, L keys, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Part = tuple[torch.Tensor, torch.Tensor]
"""Output [..., N, E] over some keys and its log-sum-exp [..., N] in float32; -inf where no key is seen."""


def num_parts(num_tasks: int, length: int, min_part: int) -> int:
    """Returns into how many parts to cut `length` keys so that torch's threads share `num_tasks` tasks out evenly.

    The fewest that do: 3 tasks on 2 threads want 2, 8 on 16 want 2; none shorter than `min_part` keys.
    """
    threads = torch.get_num_threads()
    return max(1, min(threads // math.gcd(num_tasks, threads), length // min_part))


def has_cpu_flash() -> bool:
    """Whether this torch has the CPU flash kernel that also returns the log-sum-exp."""
    return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


def cpu_flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    causal: bool,
) -> Part:
    """Attends with query [B, H, N, D] over keys and values [B, H, L, D]; views with any stride but the last.

    Returns:
        Output [B, H, N, D] in the input's dtype and log-sum-exp [B, H, N] in float32.
    """
    if query.stride(-1) != 1:  # the kernel reads such a query wrongly, without an error
        query = query.contiguous()
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, causal, scale=scaling
    )
    return out, lse


def merge(parts: Sequence[Part]) -> torch.Tensor:
    """Merges outputs [..., N, D] with log-sum-exps [..., N] of disjoint keys, in the dtype of the first output."""
    if len(parts) == 1:
        return parts[0][0]
    return mix(*_stacked(parts), 0).to(parts[0][0].dtype)


def merge_parts(parts: Sequence[Part]) -> Part:
    """Merges parts with disjoint keys into the part of all their keys, float32; none seen gives zeros and -inf."""
    outs, lses = _stacked(parts)
    return mix(outs, lses, 0), torch.logsumexp(lses, 0)


def _stacked(parts: Sequence[Part]) -> Part:
    return torch.stack([out.float() for out, _ in parts]), torch.stack([lse for _, lse in parts])


def mix(outs: torch.Tensor, lses: torch.Tensor, dim: int) -> torch.Tensor:
    """Merges along one dimension: outs [..., D] float32 with lses [...], both with the parts at `dim`."""
    # a query that sees no key of any part has -inf everywhere, and softmax makes NaN of that
    weights = torch.softmax(lses, dim).nan_to_num(0.0)
    return (outs * weights[..., None]).sum(dim)
