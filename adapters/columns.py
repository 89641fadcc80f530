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

    def hold(
        self,
        trees: Sequence[torch.Tensor | int],
        num_queries: int,
        *,
        with_columns: bool = False,
    ) -> list[RowRequest]:
        """Says what each row brings to a forward that is held: so many tokens, or a tree, padded on the right to T."""
        self._pending = None
        requests = []
        for row, own in enumerate(trees):
            tree = None if isinstance(own, int) else own
            num_new = own if isinstance(own, int) else len(own)
            places = None if num_new == num_queries else torch.arange(num_new)
            positions = None
            if with_columns and self._stored is not None:
                positions = self._positions(row, num_new, tree)
            requests.append(RowRequest(num_new, places, None, positions, tree))
        return requests

    def accept(self, counts: Sequence[int]) -> None:
        """Adds so many tokens to each row, right behind its last stored column; the grid grows where it must."""
        ends = self._ends(len(counts))
        if self._stored is None and len(set(counts)) == 1:
            self.length += counts[0]
            return
        length = max([self.length, *(e + n for e, n in zip(ends, counts, strict=True) if n)])
        stored = self._stored
        if stored is None:
            stored = torch.ones(len(counts), self.length, dtype=torch.bool)
        grown = stored.new_zeros(len(counts), length)
        grown[:, : self.length] = stored
        for row, (end, count) in enumerate(zip(ends, counts, strict=True)):
            grown[row, end : end + count] = True
        self.length, self._stored = length, grown

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

    def spread(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns a grid [B, K, length, D] of the stored tokens [K, n, D] of each row; zeros elsewhere."""
        heads, _, dim = rows[0].shape
        grid = rows[0].new_zeros(len(rows), heads, self.length, dim)
        for index, row in enumerate(rows):
            places = self.places(index)
            grid[index, :, slice(None) if places is None else places] = row
        return grid

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

    def _ends(self, rows: int) -> list[int]:
        """Returns by row the column behind the last stored one."""
        if self._stored is None:
            return [self.length] * rows
        columns = torch.arange(1, self.length + 1, device=self._stored.device)
        ends: list[int] = (self._stored * columns).amax(1).tolist()
        return ends

    def _positions(self, row: int, num_new: int, tree: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the columns of a row's tokens, those of new ones by their depth; None where they are consecutive."""
        assert self._stored is not None, "no padding"
        old = self._stored[row].nonzero()[:, 0].cpu()
        if len(old) == 0 or int(old[-1] - old[0]) + 1 == len(old):
            return None
        depths = torch.arange(num_new) if tree is None else tree.sum(1).cpu() - 1
        return torch.cat([old, old[-1] + 1 + depths])

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
