"""Which patches of a vision tower a page covers, as weights, also where tower and page count in different grids.

Shapes: P pages, N patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from oval_core.errors import ConfigError

if TYPE_CHECKING:
    from oval_mm.spans import Grid

__all__ = ["page_weights", "without_class_token"]


def page_weights(
    grid: Grid, pages: Sequence[Sequence[int]], patches: tuple[int, int]
) -> torch.Tensor:
    """Returns how much of each page's area lies in each patch, [P, N]; a page's weights sum to 1.

    Both grids cover the same image. Newline places cover nothing; a page of nothing else would be an error.

    Args:
        grid: of the image tokens.
        pages: places in it, row by row; with newlines a row has `grid.cols + 1` places.
        patches: rows and columns of the tower.
    """
    per_row = _overlaps(grid.rows, patches[0])
    per_column = _overlaps(grid.cols, patches[1])
    stride = grid.cols + bool(grid.newline)
    weights = []
    for page, places in enumerate(pages):
        seen = [divmod(place, stride) for place in places if place % stride < grid.cols]
        if not seen:
            raise ConfigError(
                f"pages: got page {page} without a patch. Allowed: pages of one patch at least. Use tile_pages."
            )
        rows = torch.tensor([row for row, _ in seen])
        columns = torch.tensor([column for _, column in seen])
        area = torch.einsum("kr,kc->rc", per_row[rows], per_column[columns])
        weights.append(area.flatten() / area.sum())
    return torch.stack(weights)


def without_class_token(hidden: torch.Tensor, patches: tuple[int, int]) -> torch.Tensor:
    """Returns the patches [B, N, H] of a tower's hidden states, with or without a class token in front.

    Raises:
        ConfigError: neither fits.
    """
    count = patches[0] * patches[1]
    extra = hidden.shape[1] - count
    if extra not in (0, 1):
        raise ConfigError(
            f"hidden: got {hidden.shape[1]} tokens for {patches[0]} x {patches[1]} patches. Allowed: {count}, or one more for "
            "a class token. Pass the hidden states of this image."
        )
    return hidden[:, extra:]


def _overlaps(cells: int, patches: int) -> torch.Tensor:
    """Returns the length of each cell that lies in each patch, [cells, patches]; both cut 0..1 evenly."""
    starts = torch.arange(cells)[:, None] / cells
    ends = torch.arange(1, cells + 1)[:, None] / cells
    patch_starts = torch.arange(patches) / patches
    patch_ends = torch.arange(1, patches + 1) / patches
    common = torch.minimum(ends, patch_ends) - torch.maximum(starts, patch_starts)
    return torch.where(common > 1e-6, common, torch.zeros_like(common))
