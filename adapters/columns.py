"""Keeps Hugging Face's padded grid of tokens [B, L] and OVAL's rows of real tokens in step.

Hugging Face counts columns: a left-padded row has as many as its neighbours. OVAL stores no padding: pages hold
real tokens only, so a short row costs what it is long, and no page summary is spoilt by padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from oval_core.errors import CacheMismatchError
from oval_core.values import RowRequest


class ColumnMap:
    """Which columns of the grid hold a stored token. No mask is kept until padding turns up."""

    def __init__(self) -> None:
        self.length = 0
        self._stored: torch.Tensor | None = None  # bool [B, length]; None: every column
        self._pending: torch.Tensor | None = None  # bool [B, T] of the running forward

    def request(
        self,
        mask: torch.Tensor | None,
        batch_size: int,
        num_queries: int,
        *,
        with_columns: bool = False,
    ) -> list[RowRequest]:
        """Says what each row brings to a forward.

        Args:
            mask: [B, length + T], true or 1 for real tokens, as Hugging Face passes it; None for all real.
            batch_size: B.
            num_queries: T.
            with_columns: also say which columns a row's tokens are in, where padding lies between them:
                Hugging Face's sliding windows count columns.
        """
        self._pending = None
        if mask is None:
            if self._stored is None:
                return [RowRequest(num_queries)] * batch_size
            # Nothing said of the old columns: padding stays padding.
            mask = torch.cat([self._stored, self._stored.new_ones(batch_size, num_queries)], dim=1)
        self._check_shape(mask, batch_size, num_queries)
        mask = mask.bool()
        if self._stored is None and bool(mask.all()):
            return [RowRequest(num_queries)] * batch_size
        old, new = mask.split([self.length, num_queries], dim=1)
        stored = self._stored if self._stored is not None else torch.ones_like(old)
        stored = stored.to(mask.device)
        if bool((old & ~stored).any()):
            raise CacheMismatchError(
                "attention_mask: got 1 for a token that was padding when it was cached. Allowed: 1 only for "
                "tokens that were real then. Pass the mask of the earlier turn, extended."
            )
        self._pending = new
        rows = [self._row(old[row], new[row], stored[row]) for row in range(batch_size)]
        if with_columns:
            grid = torch.cat([stored, new], dim=1)
            rows = [replace(r, positions=_gaps(grid[i])) for i, r in enumerate(rows)]
        return rows

    def commit(self, num_queries: int) -> None:
        """Adds the columns of the forward that `request` described."""
        new = self._pending
        if new is not None:  # always so once there is padding
            stored = self._stored
            if stored is None:
                stored = new.new_ones(new.shape[0], self.length)
            self._stored = torch.cat([stored.to(new.device), new], dim=1)
        self.length += num_queries
        self._pending = None

    def crop(self, length: int, batch_size: int) -> list[int]:
        """Keeps the first `length` columns; returns how many stored tokens each row keeps."""
        self.length = length
        if self._stored is None:
            return [length] * batch_size
        self._stored = self._stored[:, :length]
        kept: list[int] = self._stored.sum(1).tolist()
        return kept

    def select(self, rows: Sequence[int]) -> None:
        """Makes the grid rows[0], rows[1], ... of the old one."""
        if self._stored is not None:
            self._stored = self._stored[list(rows)]

    def places(self, row: int) -> torch.Tensor | None:
        """Columns of a row's stored tokens, or None when they are all."""
        return None if self._stored is None else self._stored[row].nonzero()[:, 0]

    @property
    def has_padding(self) -> bool:
        """Whether some column of some row holds no token."""
        return self._stored is not None

    def copy(self) -> ColumnMap:
        """Returns an independent copy."""
        twin = ColumnMap()
        twin.length, twin._stored = self.length, self._stored  # tensors are replaced, never written
        return twin

    def reset(self) -> None:
        """Forgets every column."""
        self.length = 0
        self._stored = self._pending = None

    def _row(self, old: torch.Tensor, new: torch.Tensor, stored: torch.Tensor) -> RowRequest:
        places = None if bool(new.all()) else new.nonzero()[:, 0]
        num_new = new.shape[0] if places is None else places.shape[0]
        hidden = ~old[stored]
        return RowRequest(num_new, places, hidden if bool(hidden.any()) else None)

    def _check_shape(self, mask: torch.Tensor, batch_size: int, num_queries: int) -> None:
        want = (batch_size, self.length + num_queries)
        if tuple(mask.shape) != want:
            raise CacheMismatchError(
                f"attention_mask: got shape {tuple(mask.shape)}. Allowed: {want}, a column for each of "
                f"{self.length} cached and {num_queries} new tokens. Extend the mask, or pass none."
            )


def _gaps(row: torch.Tensor) -> torch.Tensor | None:
    places = row.nonzero()[:, 0]
    consecutive = len(places) == 0 or int(places[-1] - places[0]) + 1 == len(places)
    return None if consecutive else places
