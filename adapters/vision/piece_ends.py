"""Where a forward with images is cut, where fast memory takes only so many new tokens at a time.

A piece is best cut between images, else between rows of an image's tiles: then its pages are those of one forward. Shapes:
B rows, T columns of the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from oval_adapters.vision.placement import ImagePart, Parts, cut_parts
from oval_mm.tiles import tile_pages

if TYPE_CHECKING:
    from oval_core.paged_cache import PagedCache

__all__ = ["PieceEnds"]


class PieceEnds:
    """Says piece by piece where the next one ends: what fits is counted in the pages as they are then."""

    def __init__(
        self,
        paged: PagedCache,
        rows: int,
        num_queries: int,
        images: Sequence[Parts] = (),
        unread: torch.Tensor | None = None,
    ) -> None:
        """Looks at a forward.

        Args:
            paged: the cache that it is for.
            rows: B.
            num_queries: T.
            images: by row, which columns are images; nothing where all are text.
            unread: bool [B, T] columns that bring no token; None for none.
        """
        self._paged, self._rows, self._num_queries = paged, rows, num_queries
        self._images = images if any(images) else ()
        self._unread = unread
        self._limit = paged.max_new_tokens(rows)
        self._orders: list[torch.Tensor] | None = None

    def after(self, start: int) -> int:
        """Returns the column before which the piece ends that begins at column `start`."""
        rest = self._num_queries - start
        if self._limit is None:
            return self._num_queries
        if not self._images:
            return start + min(rest, self._limit)
        assert self._paged.tiers is not None, "memory sets a limit"
        most = self._paged.tiers.memory.half_a_row(self._rows)
        if rest <= most and self._fits(start, self._num_queries):
            return self._num_queries
        for may_end in self._ends(most):
            ends = may_end[start + 1 : start + most + 1].nonzero()[:, 0].flip(0)
            for end in (ends + start + 1).tolist():
                if self._fits(start, end):
                    return int(end)
        return start + 1  # what does not even fit alone is told by the cache

    def _ends(self, most: int) -> list[torch.Tensor]:
        """Returns where pieces may end, bool [T + 1] each: between images, between rows of tiles, anywhere."""
        if self._orders is None:
            between = torch.ones(self._num_queries + 1, dtype=torch.bool)
            anywhere, by_tiles = between.clone(), between.clone()
            for part in (part for own in self._images for part in own):
                whole, column = _whole_tiles(part, self._paged.image_tile), part.column
                by_tiles[column + 1 : column + part.length] &= whole
                between[column + 1 : column + part.length] &= whole & (part.length > most)
            self._orders = [between, by_tiles, anywhere]
        return self._orders

    def _fits(self, start: int, end: int) -> bool:
        return self._paged.takes([self._counts(row, start, end) for row in range(self._rows)])

    def _counts(self, row: int, start: int, end: int) -> list[int]:
        """Returns lengths of the texts and images of a piece in turn, a text first and last; padding counts as text."""
        counts, at = [0], 0
        for part in cut_parts(self._images[row], start, end):
            counts[-1] += part.column - at
            at = part.column + part.length
            unread = 0
            if self._unread is not None:
                unread = int(self._unread[row, start + part.column : start + at].sum())
            if part.length > unread:
                counts += [part.length - unread, 0]
        counts[-1] += end - start - at
        return counts


def _whole_tiles(part: ImagePart, tile: int) -> torch.Tensor:
    """Returns before which of a part's places, from its second on, no tile is cut, bool [length - 1]."""
    whole = torch.ones(part.view.grid.size + 1, dtype=torch.bool)
    for page in tile_pages(part.view.grid, tile):
        whole[page[0] + 1 : page[-1] + 1] = False
    return whole[part.first + 1 : part.first + part.length]
