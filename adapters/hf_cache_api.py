"""What Hugging Face asks any cache: lengths in columns, and rows to reorder. Answers from the columns; stores nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import Cache

if TYPE_CHECKING:
    from oval_adapters.columns import ColumnMap
    from oval_core.paged_cache import PagedCache

__all__ = ["HfCacheApi"]


class HfCacheApi(Cache, ABC):
    """Base of `OvalCache`: the part that only translates."""

    paged: PagedCache
    _columns: ColumnMap

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def batch_size(self) -> int:
        """Rows of the batch, or -1 before the first forward, as Hugging Face has it."""
        return self.paged.batch_size or -1

    @property
    def is_initialized(self) -> bool:
        """Whether a token was written."""
        return self._columns.length > 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of cached columns, padding and unread image tokens included."""
        return self._columns.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Returns (columns after a forward of `query_length`, offset 0)."""
        return self._columns.length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Returns -1: the pool grows."""
        return -1

    def max_new_tokens(self, rows: int) -> int | None:
        """Returns how many tokens a row a held forward may bring; None where memory sets no limit."""
        return self.paged.max_new_tokens(rows)

    def unread_columns(self, row: int, start: int, length: int) -> torch.Tensor:
        """Returns which columns [start, start + length) of a row hold an image token that is not read yet, bool [length]."""
        return self._columns.unread(row, start, length)

    def stored_columns(self, row: int) -> torch.Tensor:
        """Returns the column of each stored token of a row, in the order of its tokens, long [n].

        Columns of padding and of unread image tokens are left out; image tokens that were read late come where they
        were stored, not where they lie.
        """
        places = self._columns.places(row)
        return torch.arange(self._columns.length) if places is None else places.cpu()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Makes row i what row beam_idx[i] was (beam search): pages are shared, not copied."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times, in place of the row."""
        self._select([row for row in range(self.paged.batch_size) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps only these rows; a bool mask [B] or row numbers."""
        rows = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        self._select(rows.tolist())

    @abstractmethod
    def _select(self, rows: list[int]) -> None:
        """Makes the batch rows[0], rows[1], ... of the old one; a row may come several times, or not at all."""
