"""Keeps Hugging Face's padded grid of tokens [B, L] and OVAL's rows of real tokens in step.

Hugging Face counts columns: a left-padded row has as many as its neighbours. OVAL stores no padding: pages hold
real tokens only, so a short row costs what it is long, and no page summary is spoilt by padding. Image tokens that a
prompt left unread are holes: columns that hold no token yet, and may be filled later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from oval_adapters.vision.holes import Holes
from oval_core.errors import CacheMismatchError
from oval_core.values import RowRequest


class ColumnMap:
    """Which columns of the grid hold a stored token. No mask is kept until padding turns up."""

    def __init__(self) -> None:
        self.length = 0
        self._stored: torch.Tensor | None = None  # bool [B, length]; None: every column
        self._pending: torch.Tensor | None = None  # bool [B, T] of the running forward
        self._holes = Holes()

    def request(
        self,
        mask: torch.Tensor | None,
        batch_size: int,
        num_queries: int,
        *,
        with_columns: bool = False,
        unread: torch.Tensor | None = None,
    ) -> list[RowRequest]:
        """Says what each row brings to a forward.

        Args:
            mask: [B, length + T], true or 1 for real tokens, as Hugging Face passes it; None for all real.
            batch_size: B.
            num_queries: T.
            with_columns: also say which columns a row's tokens are in, where padding lies between them:
                Hugging Face's sliding windows count columns.
            unread: bool [B, T] which of the new columns become holes; None for none.
        """
        self._forget()
        if mask is None:
            if self._stored is None and unread is None:
                return [RowRequest(num_queries)] * batch_size
            # Nothing said of the old columns: padding stays padding.
            mask = self._whole_mask(batch_size, num_queries, unread)
        self._check_shape(mask, batch_size, num_queries)
        mask = mask.bool()
        if self._stored is None and unread is None and bool(mask.all()):
            return [RowRequest(num_queries)] * batch_size
        old, new = mask.split([self.length, num_queries], dim=1)
        stored = self._stored if self._stored is not None else torch.ones_like(old)
        stored = stored.to(mask.device)
        if bool((old & ~stored & ~self._holes.grid(old)).any()):
            raise CacheMismatchError(
                "attention_mask: got 1 for a token that was padding when it was cached. Allowed: 1 only for "
                "tokens that were real then. Pass the mask of the earlier turn, extended."
            )
        if unread is not None:
            unread = unread.to(new.device) & new
            self._holes.begin(unread)
            new = new & ~unread
        self._pending = new
        orders = [self._holes.order(row, own) for row, own in enumerate(stored)]
        rows = [_row(old[i], new[i], order) for i, order in enumerate(orders)]
        if with_columns:
            ends = [self.length + own.nonzero()[:, 0] for own in new]
            rows = [
                replace(row, positions=_gaps(torch.cat([orders[i], ends[i]])))
                for i, row in enumerate(rows)
            ]
        return rows

    def fill(self, columns: Sequence[torch.Tensor], num_queries: int) -> list[RowRequest]:
        """Says what each row brings to a forward that reads holes, padded on the left to `num_queries`.

        The tokens come last in their rows, and are causal by column.

        Args:
            columns: by row, holes, ascending.
            num_queries: T.
        """
        self._forget()
        assert self._stored is not None, "no holes"
        self._holes.begin_filling(columns)
        requests = []
        for row, own in enumerate(columns):
            places = torch.arange(num_queries - len(own), num_queries)
            order = self._holes.order(row, self._stored[row]).cpu()
            request = RowRequest(
                len(own),
                None if len(own) == num_queries else places,
                positions=torch.cat([order, own]),
                by_position=True,
            )
            requests.append(request)
        return requests

    def coming(self, batch_size: int, num_queries: int) -> torch.Tensor:
        """Returns which columns of the forward that `request` described bring a token, bool [B, T]."""
        if self._pending is None:
            return torch.ones(batch_size, num_queries, dtype=torch.bool)
        return self._pending

    def unread(self, row: int, start: int, length: int) -> torch.Tensor:
        """Returns which columns [start, start + length) of a row are holes, bool [length]."""
        if self._stored is None:
            return torch.zeros(length, dtype=torch.bool)
        return self._holes.grid(self._stored)[row, start : start + length]

    def commit(self, num_queries: int) -> None:
        """Adds the columns of the forward that `request` described."""
        stored, new = self._stored, self._pending
        filled = self._holes.commit(self.length, stored)
        if filled is not None:
            self._stored = filled
            return
        if new is not None:  # always so once there is padding
            if stored is None:
                stored = new.new_ones(new.shape[0], self.length)
            self._stored = torch.cat([stored.to(new.device), new], dim=1)
        self.length += num_queries if new is None else new.shape[1]
        self._pending = None

    def abort(self) -> None:
        """Forgets the forward that was described last."""
        self._forget()

    def hold(
        self,
        trees: Sequence[torch.Tensor | int],
        num_queries: int,
        *,
        with_columns: bool = False,
    ) -> list[RowRequest]:
        """Says what each row brings to a forward that is held: so many tokens, or a tree, padded on the right to T."""
        self._forget()
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
        self._stored = self._holes.crop(length, self._stored)[:, :length]
        kept: list[int] = self._stored.sum(1).tolist()
        return kept

    def select(self, rows: Sequence[int]) -> None:
        """Makes the grid rows[0], rows[1], ... of the old one."""
        if self._stored is not None:
            self._stored = self._stored[list(rows)]
            self._holes.select(rows)

    def places(self, row: int) -> torch.Tensor | None:
        """Columns of a row's stored tokens, in their order, or None when they are all."""
        return None if self._stored is None else self._holes.order(row, self._stored[row])

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
        twin._holes = self._holes.copy()
        return twin

    def reset(self) -> None:
        """Forgets every column."""
        self.length = 0
        self._stored = self._pending = None
        self._holes = Holes()

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
        old = self._holes.order(row, self._stored[row]).cpu()
        if _gaps(old) is None:
            return None
        depths = torch.arange(num_new) if tree is None else tree.sum(1).cpu() - 1
        return torch.cat([old, old.max() + 1 + depths])

    def _forget(self) -> None:
        self._pending = None
        self._holes.abort()

    def _whole_mask(
        self, batch_size: int, num_queries: int, like: torch.Tensor | None
    ) -> torch.Tensor:
        stored = self._stored
        if stored is None:
            assert like is not None, "no padding and no holes"
            return like.new_ones(batch_size, self.length + num_queries)
        return torch.cat([stored, stored.new_ones(batch_size, num_queries)], dim=1)

    def _check_shape(self, mask: torch.Tensor, batch_size: int, num_queries: int) -> None:
        want = (batch_size, self.length + num_queries)
        if tuple(mask.shape) != want:
            raise CacheMismatchError(
                f"attention_mask: got shape {tuple(mask.shape)}. Allowed: {want}, a column for each of "
                f"{self.length} cached and {num_queries} new tokens. Extend the mask, or pass none."
            )


def _row(old: torch.Tensor, new: torch.Tensor, order: torch.Tensor) -> RowRequest:
    places = None if bool(new.all()) else new.nonzero()[:, 0]
    num_new = new.shape[0] if places is None else places.shape[0]
    hidden = ~old[order]
    return RowRequest(num_new, places, hidden if bool(hidden.any()) else None)


def _gaps(places: torch.Tensor) -> torch.Tensor | None:
    """Returns the columns of a row's tokens; None where each follows the one before."""
    return None if bool((places.diff() == 1).all()) else places
