"""Where records are: addresses or offsets, tokens and checksums of the chunks of many pages at once, as arrays.

Layers ask for the same pages one after the other, so what is the same for all of them is remembered: the worker must
not hold Python's lock for longer than it copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oval_core.native.chunk_io import ChunkShape
from oval_core.tiers.record import RecordLayout

_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks of one layer: where each starts, int64, its tokens, int64, its checksum, uint64; their shape."""

    starts: np.ndarray
    tokens: np.ndarray
    checksums: np.ndarray
    shape: ChunkShape


@dataclass(frozen=True, slots=True)
class _Entry:
    start: int
    num_tokens: int
    checksums: np.ndarray  # [layers]


class RecordIndex:
    """Records by page id. One thread changes it; another may ask at the same time."""

    def __init__(self, layout: RecordLayout) -> None:
        self._layout = layout
        self._entries: dict[int, _Entry] = {}
        self._groups: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def __contains__(self, page_id: int) -> bool:
        return page_id in self._entries

    def oldest(self) -> int:
        """Returns the page that has been here longest."""
        oldest: int = next(iter(self._entries))
        return oldest

    def num_tokens(self, page_id: int) -> int:
        """Returns how many tokens a page has."""
        return self._entries[page_id].num_tokens

    def add(self, page_id: int, start: int, num_tokens: int, checksums: Sequence[int] = ()) -> None:
        """Makes a record known that is whole and starts at this address or offset."""
        self._entries[page_id] = _Entry(start, num_tokens, np.array(checksums, np.uint64))

    def drop(self, page_id: int) -> int | None:
        """Forgets a record; returns how many tokens it had, or None if it was not there."""
        entry = self._entries.pop(page_id, None)
        self._groups = {}
        return None if entry is None else entry.num_tokens

    def chunks(self, layer: int, page_ids: Sequence[int]) -> Chunks:
        """Returns the chunks of one layer (a place in the layout) of these pages."""
        key, groups = tuple(page_ids), self._groups
        group = groups.get(key)
        if group is None:
            if len(groups) >= _REMEMBERED:
                groups.clear()
            group = groups[key] = self._group(key)
        starts, counts, checksums = group
        return Chunks(
            starts + counts * self._layout.bytes_before(layer),
            counts,
            np.ascontiguousarray(checksums[:, layer]) if checksums.size else checksums,
            self._layout.shapes[layer].in_bytes,
        )

    def _group(self, page_ids: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        entries = [self._entries[page_id] for page_id in page_ids]
        return (
            np.array([entry.start for entry in entries], np.int64),
            np.array([entry.num_tokens for entry in entries], np.int64),
            np.stack([entry.checksums for entry in entries]),
        )
