"""Checks a ready 4-D attention mask and makes it additive."""

from __future__ import annotations

import torch

from oval_adapters.columns import ColumnMap
from oval_core.errors import CacheMismatchError

__all__ = ["additive"]


def additive(mask: torch.Tensor, shape: tuple[int, int, int], columns: ColumnMap) -> torch.Tensor:
    """Returns an additive mask [B or 1, H or 1, T, L] of a bool or additive one.

    Args:
        mask: as the caller gave it.
        shape: B, H, T of the forward.
        columns: those cached before.
    Raises:
        CacheMismatchError: a mask of the wrong shape, or on a cache with padding.
    """
    batch_size, heads, num_queries = shape
    want = (num_queries, columns.length + num_queries)
    fits = (
        mask.shape[0] in (1, batch_size)
        and mask.shape[1] in (1, heads)
        and tuple(mask.shape[2:]) == want
        and (mask.dtype == torch.bool or mask.is_floating_point())
    )
    if not fits or columns.has_padding:
        raise CacheMismatchError(
            f"4-D attention_mask: got {tuple(mask.shape)}, {mask.dtype}, on a cache of "
            f"{columns.length} columns{' with padding' if columns.has_padding else ''}. Allowed: "
            f"[{batch_size} or 1, {heads} or 1, {want[0]}, {want[1]}], bool or floating, and no padding cached "
            "before. Pass such a mask, or a 2-D mask."
        )
    if mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=torch.float32, device=mask.device)
        return torch.where(mask, zero, float("-inf"))
    return mask
