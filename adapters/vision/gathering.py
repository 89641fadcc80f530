"""Runs a decoder on some of a forward's columns: takes them out before it, and puts what comes out back in place.

Shapes: B rows, T columns of the forward, W columns that the decoder gets, C hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from oval_core.errors import UnsupportedModelError
from oval_core.values import RowRequest

__all__ = ["Gathering"]

_BY_COLUMN = ("input_ids", "inputs_embeds", "position_ids")


class Gathering:
    """Which columns stay, row by row; rows with fewer are padded on the left.

    Args:
        counts: columns that each row keeps.
        columns: [B, W] the column of each place; any column where a row is padded.
    """

    def __init__(self, counts: Sequence[int], columns: torch.Tensor) -> None:
        self._counts, self._columns = counts, columns

    @classmethod
    def of(cls, kept: torch.Tensor) -> Gathering:
        """Makes one for columns bool [B, T]; a forward of at least one column."""
        counts: list[int] = kept.sum(1).tolist()
        width = max(1, *counts)
        # the kept ones last, in order: a stable sort of False before True
        order = kept.to(torch.int8).argsort(dim=1, stable=True)
        return cls(counts, order[:, kept.shape[1] - width :])

    @property
    def width(self) -> int:
        """W."""
        return int(self._columns.shape[1])

    def narrow(self, requests: Sequence[RowRequest]) -> list[RowRequest]:
        """Returns what rows bring with places among the W columns in place of the T."""
        told = []
        for request, count in zip(requests, self._counts, strict=True):
            assert request.num_new == count, "a row brings other tokens than it keeps"
            places = None if count == self.width else torch.arange(self.width - count, self.width)
            told.append(replace(request, query_places=places))
        return told

    def inputs(self, kwargs: Mapping[str, Any], positions: torch.Tensor) -> dict[str, Any]:
        """Returns a decoder's arguments for the columns that stay.

        Args:
            kwargs: of the whole forward, by name.
            positions: position ids [B or 1, T] of all columns.
        Raises:
            UnsupportedModelError: an argument has a column for each token and nobody knows how to cut it.
        """
        rows, total = len(self._counts), positions.shape[1]
        for name, value in kwargs.items():
            by_column = torch.is_tensor(value) and value.ndim > 1 and value.shape[1] == total
            if by_column and total > 1 and name not in (*_BY_COLUMN, "attention_mask"):
                raise UnsupportedModelError(
                    f"vision.budget: the decoder got {name!r} with {total} columns, and OVAL does not know how to leave image "
                    "tokens out of it. Allowed: ids, embeddings and positions. Leave the budget out with this model."
                )
        told = {**kwargs, "position_ids": self.take(positions.expand(rows, -1))}
        for name in ("input_ids", "inputs_embeds"):
            if kwargs.get(name) is not None:
                told[name] = self.take(kwargs[name])
        return told

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Returns columns [B, W, ...] of values [B, T, ...]."""
        columns = self._columns.to(values.device)
        rows = torch.arange(len(values), device=values.device)[:, None]
        return values[rows, columns]

    def put(self, values: torch.Tensor, total: int) -> torch.Tensor:
        """Returns values [B, T, ...] with [B, W, ...] in their columns, and zeros elsewhere."""
        out = values.new_zeros(values.shape[0], total, *values.shape[2:])
        for row, count in enumerate(self._counts):
            start = self.width - count
            out[row, self._columns[row, start:].to(out.device)] = values[row, start:]
        return out

    def spread(self, output: Any, total: int) -> Any:
        """Returns a decoder's output with all T columns; states of columns that it did not get are zero."""
        if isinstance(output, tuple):
            return tuple(self._spread(part, total) for part in output)
        whole = {"last_hidden_state": self.put(output.last_hidden_state, total)}
        if output.hidden_states is not None:
            whole["hidden_states"] = tuple(self.put(own, total) for own in output.hidden_states)
        return replace(output, **whole)

    def _spread(self, part: Any, total: int) -> Any:
        if torch.is_tensor(part):
            return self.put(part, total) if part.ndim == 3 else part
        if isinstance(part, tuple):
            return tuple(self._spread(own, total) for own in part)
        return part
