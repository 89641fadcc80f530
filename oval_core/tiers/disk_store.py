"""Records in one file: a page's K and V of all layers together, a checksum for each layer of it kept in memory.

A record is whole on the disk before the index knows it, so a reader meets the whole page or none. What was written
and what is read must agree by checksum; else the reader gets an error, never wrong bytes.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from oval_core.errors import TierError
from oval_core.slot_allocator import SlotAllocator
from oval_core.tiers import page_files
from oval_core.tiers.page_store import Piece
from oval_core.tiers.record import RecordLayout

_BLOCK = 4096
"""Bytes: what space is given out in, and what direct I/O must be aligned to."""

_GROWTH = 1024
"""Blocks by which the file's space grows at least."""


@dataclass(frozen=True, slots=True)
class _Entry:
    block: int
    num_blocks: int
    num_tokens: int
    checksums: tuple[int, ...]


class DiskStore:
    """Records in a file of its own, removed when the store is closed, collected, or the interpreter ends."""

    name = "disk"

    def __init__(self, layout: RecordLayout, folder: Path, direct_io: bool) -> None:
        """Makes the file.

        Args:
            layout: of the records.
            folder: where the file is made.
            direct_io: go past the page cache of the operating system.
        Raises:
            TierError: the file cannot be made, or the file system knows no direct I/O.
        """
        self._layout = layout
        self._entries: dict[int, _Entry] = {}
        self._space = SlotAllocator()
        self._bytes = 0
        try:
            self._fd, self.path = page_files.create(folder)
        except OSError as error:
            raise TierError(
                f"no page file could be made in {folder}: {error.strerror}. Name another folder as tiers.disk."
            ) from error
        self._end = weakref.finalize(self, _remove, self._fd, self.path, os.getpid())
        self._bounce: mmap.mmap | None = None
        if direct_io:
            _set_direct(self._fd, self.path)
            self._bounce = mmap.mmap(-1, _BLOCK)

    @property
    def bytes_stored(self) -> int:
        """Bytes of the records held, rounded up to blocks."""
        return self._bytes

    def put(self, page_id: int, num_tokens: int, record: np.ndarray) -> None:
        """Writes a record; see `PageStore.put`."""
        num_blocks = -(-record.nbytes // _BLOCK)
        block = self._allocate(num_blocks)
        data: memoryview = record.data
        if self._bounce is not None:
            data = _aligned(num_blocks * _BLOCK)
            data[: record.nbytes] = record.data
        try:
            _write_all(self._fd, data, block * _BLOCK)
        except OSError as error:
            self._space.free(block, num_blocks)
            raise TierError(
                f"page {page_id} could not be written to {self.path}: {error.strerror}. It stays in fast memory, "
                "nothing is lost. Make room on that disk, or name another folder as tiers.disk."
            ) from error
        checksums = tuple(
            xxhash.xxh3_64_intdigest(record[self._layout.chunk(layer, num_tokens)].data)
            for layer in range(self._layout.num_layers)
        )
        self._entries[page_id] = _Entry(block, num_blocks, num_tokens, checksums)
        self._bytes += num_blocks * _BLOCK

    def read(self, layer: int, pieces: Sequence[Piece]) -> None:
        """Reads and checks chunks; see `PageStore.read`."""
        for page_id, out in pieces:
            entry = self._entries[page_id]
            chunk = self._layout.chunk(layer, entry.num_tokens)
            self._read(page_id, entry.block * _BLOCK + chunk.start, out)
            self._check(page_id, entry, layer, out)

    def read_record(self, page_id: int) -> np.ndarray:
        """Returns a whole record, checked."""
        entry = self._entries[page_id]
        record = np.empty(self._layout.token_bytes * entry.num_tokens, np.uint8)
        self._read(page_id, entry.block * _BLOCK, record)
        for layer in range(self._layout.num_layers):
            self._check(page_id, entry, layer, record[self._layout.chunk(layer, entry.num_tokens)])
        return record

    def drop(self, page_id: int) -> None:
        """Forgets a page; its space is used again."""
        entry = self._entries.pop(page_id, None)
        if entry is not None:
            self._space.free(entry.block, entry.num_blocks)
            self._bytes -= entry.num_blocks * _BLOCK

    def __contains__(self, page_id: int) -> bool:
        return page_id in self._entries

    def clear(self) -> None:
        """Forgets every page and gives the space back to the disk."""
        self._entries = {}
        self._space = SlotAllocator()
        self._bytes = 0
        if self._end.alive:
            os.ftruncate(self._fd, 0)

    def close(self) -> None:
        """Removes the file."""
        self._entries = {}
        self._bytes = 0
        self._end()

    def _allocate(self, num_blocks: int) -> int:
        block = self._space.allocate(num_blocks)
        if block is None:
            self._space.grow(max(num_blocks, _GROWTH, self._space.num_slots // 8))
            block = self._space.allocate(num_blocks)
        assert block is not None
        return block

    def _read(self, page_id: int, start: int, out: np.ndarray) -> None:
        try:
            if self._bounce is None:
                count = os.preadv(self._fd, [out.data], start)
            else:
                count = self._read_direct(start, out)
        except OSError as error:
            raise TierError(
                f"page {page_id} could not be read from {self.path}: {error.strerror}. The text cannot go on. "
                "Check that disk, and generate again."
            ) from error
        if count != out.nbytes:
            raise TierError(
                f"page {page_id} is not whole in {self.path}: got {count} of {out.nbytes} bytes; something else cut "
                "the file. The text cannot go on. Leave page files alone, and generate again."
            )

    def _read_direct(self, start: int, out: np.ndarray) -> int:
        # [ first block .. start .. end .. last block ]: only whole blocks can be read
        first = start // _BLOCK * _BLOCK
        size = -(-(start + out.nbytes) // _BLOCK) * _BLOCK - first
        assert self._bounce is not None
        if len(self._bounce) < size:
            self._bounce = mmap.mmap(-1, size)
        view = memoryview(self._bounce)[:size]
        count = os.preadv(self._fd, [view], first) - (start - first)
        out[:] = np.frombuffer(view, np.uint8)[start - first :][: out.nbytes]
        return max(0, min(count, out.nbytes))

    def _check(self, page_id: int, entry: _Entry, layer: int, chunk: np.ndarray) -> None:
        if xxhash.xxh3_64_intdigest(chunk.data) != entry.checksums[layer]:
            raise TierError(
                f"page {page_id} is damaged in {self.path}: layer {layer} has another checksum than when it was "
                "written. The text cannot go on. Check that disk, and generate again."
            )


def _write_all(fd: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], start + done)


def _aligned(num_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, num_bytes))


def _set_direct(fd: int, path: Path) -> None:
    flag = getattr(os, "O_DIRECT", None)
    if flag is not None:
        import fcntl

        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | flag)
        except OSError:
            flag = None
    if flag is None:
        raise TierError(
            f"direct I/O is not there for {path.parent}. Allowed: file systems that know O_DIRECT. Leave "
            "tiers.direct_io out, or name another folder as tiers.disk."
        )


def _remove(fd: int, path: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not remove its parent's file
        page_files.remove(fd, path)
