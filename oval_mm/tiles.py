"""Cuts a grid of image patches into tiles: the pages of an image. Plain integers, no tensors."""

from __future__ import annotations

from oval_core.vision_config import check_tile
from oval_mm.spans import Grid

__all__ = ["tile_pages"]


def tile_pages(grid: Grid, tile: int = 4) -> list[list[int]]:
    """Returns the places of each page's tokens, ascending; places count the grid in reading order.

    A page is a rectangle of about `tile` x `tile` patches; where these do not divide the grid, tiles differ by one row or
    column at most, so that no sliver is left. A grid that is narrower or lower than a tile gets longer ones. The newline
    token of a row joins the row's last tile. No page has more than tile * (tile + 1) tokens.

    Args:
        grid: the patches.
        tile: 1..5.
    Raises:
        ConfigError: no such tile.
    """
    check_tile(tile)
    area = tile * tile
    width = min(grid.cols, max(tile, area // min(grid.rows, tile)))
    height = min(grid.rows, max(tile, area // (width + int(grid.newline))))
    pages = []
    for top, bottom in _cuts(grid.rows, height):
        for left, right in _cuts(grid.cols, width):
            end = right + int(grid.newline and right == grid.cols)
            pages.append(
                [row * grid.width + col for row in range(top, bottom) for col in range(left, end)]
            )
    return pages


def _cuts(length: int, size: int) -> list[tuple[int, int]]:
    """Cuts [0, length) into as few parts of at most `size` as possible, as equal as possible, longer ones first."""
    count = -(-length // size)
    short, longer = divmod(length, count)
    cuts, start = [], 0
    for index in range(count):
        end = start + short + int(index < longer)
        cuts.append((start, end))
        start = end
    return cuts
