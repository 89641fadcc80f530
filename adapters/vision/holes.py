"""Columns of a cache that hold no token yet, and the order of tokens that filled some later.

Shapes: B rows, L columns, n tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Holes"]


@dataclass(frozen=True, slots=True)
class _Filled:
    """Holes that were filled when there were so many columns; by row, in the order of the tokens."""

    length: int
    columns: tuple[torch.Tensor, ...]


class Holes:
    """Holes of a grid, and what filled them. Tensors are replaced, never written."""

    def __init__(self) -> None:
        self._grid: torch.Tensor | None = None  # bool [B, up to L]
        self._filled: tuple[_Filled, ...] = ()
        self._pending: torch.Tensor | None = None  # bool [B, T] of the running forward
        self._filling: tuple[torch.Tensor, ...] | None = None

    def begin(self, new: torch.Tensor) -> None:
        """Notes which of a forward's columns, bool [B, T], become holes when it commits."""
        self._pending = new

    def begin_filling(self, columns: Sequence[torch.Tensor]) -> None:
        """Notes which holes a forward fills, by row."""
        self._filling = tuple(columns)

    def abort(self) -> None:
        """Forgets the running forward."""
        self._pending = self._filling = None

    def commit(self, length: int, stored: torch.Tensor | None) -> torch.Tensor | None:
        """Lets the running forward count.

        Args:
            length: columns before it.
            stored: bool [B, L] which hold a token.
        Returns:
            What holds a token now, if it filled holes; None if it did not.
        """
        new, filling = self._pending, self._filling
        self.abort()
        if new is not None:
            before = new.new_zeros(len(new), length)
            if self._grid is not None:
                before[:, : self._grid.shape[1]] = self._grid.to(new.device)
            self._grid = torch.cat([before, new], 1)
        if filling is None:
            return None
        assert stored is not None, "no holes"
        self._filled += (_Filled(length, filling),)
        return self._set(stored, filling, filled=True)

    def grid(self, like: torch.Tensor) -> torch.Tensor:
        """Returns which columns are holes, of the shape [B, L] and on the device of `like`."""
        out = torch.zeros_like(like, dtype=torch.bool)
        if self._grid is not None:
            width = min(out.shape[1], self._grid.shape[1])
            out[:, :width] = self._grid[:, :width].to(out.device)
        return out

    def order(self, row: int, stored: torch.Tensor) -> torch.Tensor:
        """Returns the columns of a row's tokens in the order in which they were stored, long [n].

        Args:
            row: which.
            stored: bool [L] its columns that hold a token.
        """
        if not self._filled:
            return stored.nonzero()[:, 0]
        late = torch.zeros_like(stored)
        for event in self._filled:
            late[event.columns[row].to(late.device)] = True
        plain = (stored & ~late).nonzero()[:, 0]
        parts, start = [], 0
        for event in self._filled:
            end = int((plain < event.length).sum())
            parts += [plain[start:end], event.columns[row].to(plain.device)]
            start = end
        return torch.cat([*parts, plain[start:]])

    def crop(self, length: int, stored: torch.Tensor) -> torch.Tensor:
        """Keeps the first `length` columns: tokens that filled holes after that are holes again; returns what is stored."""
        while self._filled and self._filled[-1].length > length:
            stored = self._set(stored, self._filled[-1].columns, filled=False)
            self._filled = self._filled[:-1]
        if self._grid is not None:
            self._grid = self._grid[:, :length]
        return stored

    def select(self, rows: Sequence[int]) -> None:
        """Makes the rows rows[0], rows[1], ... of the old ones."""
        if self._grid is not None:
            self._grid = self._grid[list(rows)]
        self._filled = tuple(
            _Filled(event.length, tuple(event.columns[row] for row in rows))
            for event in self._filled
        )

    def copy(self) -> Holes:
        """Returns an independent copy."""
        twin = Holes()
        twin._grid, twin._filled = self._grid, self._filled
        return twin

    def _set(
        self, stored: torch.Tensor, columns: Sequence[torch.Tensor], *, filled: bool
    ) -> torch.Tensor:
        assert self._grid is not None, "no holes"
        stored, self._grid = stored.clone(), self._grid.clone()
        for row, own in enumerate(columns):
            stored[row, own.to(stored.device)] = filled
            self._grid[row, own.to(self._grid.device)] = not filled
        return stored
