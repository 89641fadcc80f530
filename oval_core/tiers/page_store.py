"""What a slow tier is: records of bytes by page. Knows nothing of tensors, slots or threads' business."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from oval_core.errors import TierError
from oval_core.native.chunk_io import Target, copy_chunks
from oval_core.tiers.record import RecordLayout
from oval_core.tiers.record_index import RecordIndex


class PageStore(Protocol):
    """Keeps records of sealed pages. One thread puts and drops; another may read at the same time.

    A page is there for readers only once its record is whole; an id is never put twice.
    """

    name: str

    @property
    def bytes_stored(self) -> int:
        """Bytes of the records held."""
        ...

    def put(self, page_id: int, num_tokens: int, record: np.ndarray) -> None:
        """Takes over a record, uint8 [bytes]; raises `TierError` and holds nothing of it if that fails."""
        ...

    def read(self, layer: int, page_ids: Sequence[int], target: Target) -> None:
        """Reads chunks of one layer (a place in the layout), one behind the other, to `target`.

        Raises:
            TierError: rather than give a wrong byte.
        """
        ...

    def read_record(self, page_id: int) -> np.ndarray:
        """Returns a copy of a whole record."""
        ...

    def num_tokens(self, page_id: int) -> int:
        """Returns how many tokens a page has."""
        ...

    def drop(self, page_id: int) -> None:
        """Forgets a page; one that is not there is no error."""
        ...

    def __contains__(self, page_id: int) -> bool: ...

    def clear(self) -> None:
        """Forgets every page."""
        ...

    def close(self) -> None:
        """Gives everything back to the system. Twice is harmless."""
        ...


class HostStore:
    """Records in main memory, pinned where CUDA copies from it. Its content needs no checksum: it never leaves."""

    name = "host"

    def __init__(self, layout: RecordLayout, pinned: bool) -> None:
        self._layout = layout
        self._pinned = pinned
        self._index = RecordIndex(layout)
        self._records: dict[int, np.ndarray] = {}
        self._bytes = 0

    @property
    def bytes_stored(self) -> int:
        """Bytes of the records held."""
        return self._bytes

    def put(self, page_id: int, num_tokens: int, record: np.ndarray) -> None:
        """Keeps a copy of a record; see `PageStore.put`."""
        try:
            own = torch.empty(record.nbytes, dtype=torch.uint8, pin_memory=self._pinned).numpy()
        except RuntimeError as error:
            raise TierError(
                f"page {page_id}: main memory has no {record.nbytes} bytes left for it ({error}). The page stays "
                "in fast memory. Shorten the text, or give tiers.disk a folder and tiers.host_tokens a limit."
            ) from error
        own[:] = record
        self._records[page_id] = own
        self._index.add(page_id, own.ctypes.data, num_tokens)
        self._bytes += own.nbytes

    def read(self, layer: int, page_ids: Sequence[int], target: Target) -> None:
        """Copies chunks; see `PageStore.read`."""
        chunks = self._index.chunks(layer, page_ids)
        copy_chunks(chunks.starts, chunks.tokens, chunks.shape, target)

    def read_record(self, page_id: int) -> np.ndarray:
        """Returns a copy of a whole record."""
        return self._records[page_id].copy()

    def drop(self, page_id: int) -> None:
        """Forgets a page."""
        self._index.drop(page_id)
        record = self._records.pop(page_id, None)
        if record is not None:
            self._bytes -= record.nbytes

    def oldest(self) -> int:
        """Returns the page that has been here longest."""
        return self._index.oldest()

    def num_tokens(self, page_id: int) -> int:
        """Returns how many tokens a page has."""
        return self._index.num_tokens(page_id)

    def __contains__(self, page_id: int) -> bool:
        return page_id in self._index

    def clear(self) -> None:
        """Forgets every page."""
        self._index = RecordIndex(self._layout)
        self._records = {}
        self._bytes = 0

    close = clear
