"""The images of each row with the columns that they lie in, read or not: what was left out can be read later.

Follows crop, reorder, copy and reset with the cache's own. Shapes: n tokens of a view, C the decoder's hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oval_adapters.vision.placement import ImageView, Parts

__all__ = ["PlacedView", "UnreadImages"]


@dataclass(frozen=True, slots=True, eq=False)
class PlacedView:
    """One whole grid of an image in a row.

    Attributes:
        column: its first column in the grid of the cache.
        positions: long [n] position ids of its tokens.
        view: grid and features.
    """

    column: int
    positions: torch.Tensor
    view: ImageView

    @property
    def length(self) -> int:
        """Tokens, a column each."""
        return self.view.grid.size


class UnreadImages:
    """Views of each row, in the order of the text."""

    def __init__(self) -> None:
        self._rows: list[tuple[PlacedView, ...]] = []

    def row(self, row: int) -> tuple[PlacedView, ...]:
        """Returns the views of a row."""
        return self._rows[row] if row < len(self._rows) else ()

    @property
    def is_empty(self) -> bool:
        """Whether no row has a view."""
        return not any(self._rows)

    def add(self, column: int, images: Sequence[Parts], positions: torch.Tensor) -> None:
        """Adds the views of a forward that counts.

        Args:
            column: columns of the cache before it.
            images: by row.
            positions: long [B or 1, T] of the forward.
        """
        self._rows += [()] * (len(images) - len(self._rows))
        positions = positions.expand(len(images), -1)
        for row, parts in enumerate(images):
            new = tuple(
                PlacedView(
                    column + part.column,
                    positions[row, part.column : part.column + part.length].clone(),
                    part.view,
                )
                for part in parts
                if part.length == part.view.grid.size
            )
            self._rows[row] += new

    def crop(self, columns: int) -> None:
        """Keeps the views that end within the first columns."""
        self._rows = [
            tuple(view for view in own if view.column + view.length <= columns)
            for own in self._rows
        ]

    def select(self, rows: Sequence[int]) -> None:
        """Makes the rows rows[0], rows[1], ... of the old ones."""
        if self._rows:
            self._rows = [self.row(row) for row in rows]

    def reset(self) -> None:
        """Forgets every row."""
        self._rows = []

    def copy(self) -> UnreadImages:
        """Returns an independent copy."""
        twin = UnreadImages()
        twin._rows = list(self._rows)  # tuples are replaced, never written
        return twin
