"""Records in one file: a page's K and V of all layers together, a checksum for each layer of it kept in memory.

A record is whole on the disk before the index knows it, so a reader meets the whole page or none. What was written
and what is read must agree by checksum; else the reader gets an error, never wrong bytes.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from oval_core.errors import TierError
from oval_core.native.chunk_io import ReadFault, Target, checksum, read_chunks
from oval_core.slot_allocator import SlotAllocator
from oval_core.tiers import page_files
from oval_core.tiers.record import RecordLayout
from oval_core.tiers.record_index import Chunks, RecordIndex

_BLOCK = 4096
"""Bytes: what space is given out in, and what direct I/O must be aligned to."""

_GROWTH = 1024
"""Blocks by which the file's space grows at least."""


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
        self._index = RecordIndex(layout)
        self._regions: dict[int, tuple[int, int]] = {}  # by page id: first block, blocks
        self._space = SlotAllocator()
        self._bytes = 0
        try:
            self._fd, self.path = page_files.create(folder)
        except OSError as error:
            raise TierError(
                f"no page file could be made in {folder}: {error.strerror}. Name another folder as tiers.disk."
            ) from error
        self._end = weakref.finalize(self, _remove, self._fd, self.path, os.getpid())
        self._owner = os.getpid()
        self._is_direct = direct_io
        if direct_io:
            _set_direct(self._fd, self.path)

    @property
    def bytes_stored(self) -> int:
        """Bytes of the records held, rounded up to blocks."""
        return self._bytes

    def put(self, page_id: int, num_tokens: int, record: np.ndarray) -> None:
        """Writes a record; see `PageStore.put`."""
        if self._owner != os.getpid():
            raise TierError(
                f"page {page_id}: {self.path} belongs to the process that this one was forked from. Allowed: to read "
                "it. Generate with a new cache here."
            )
        num_blocks = -(-record.nbytes // _BLOCK)
        block = self._allocate(num_blocks)
        data: memoryview = record.data
        if self._is_direct:
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
        checksums = [
            checksum(record[self._layout.chunk(layer, num_tokens)])
            for layer in range(self._layout.num_layers)
        ]
        self._regions[page_id] = (block, num_blocks)
        self._index.add(page_id, block * _BLOCK, num_tokens, checksums)
        self._bytes += num_blocks * _BLOCK

    def read(self, layer: int, page_ids: Sequence[int], target: Target) -> None:
        """Reads and checks chunks; see `PageStore.read`."""
        chunks = self._index.chunks(layer, page_ids)
        if not self._is_direct:
            fault = read_chunks(
                self._fd, chunks.starts, chunks.tokens, chunks.checksums, chunks.shape, target
            )
        else:
            fault = self._read_direct(chunks, target)
        if fault is not None:
            size = int(chunks.tokens[fault.index]) * chunks.shape.token_bytes
            self._refuse(page_ids[fault.index], size, layer, fault)

    def read_record(self, page_id: int) -> np.ndarray:
        """Returns a whole record, checked."""
        count = self._index.num_tokens(page_id)
        record = np.empty(self._layout.token_bytes * count, np.uint8)
        for layer in range(self._layout.num_layers):
            chunk = record[self._layout.chunk(layer, count)]
            self.read(layer, [page_id], Target(chunk, count))
        return record

    def num_tokens(self, page_id: int) -> int:
        """Returns how many tokens a page has."""
        return self._index.num_tokens(page_id)

    def drop(self, page_id: int) -> None:
        """Forgets a page; its space is used again."""
        self._index.drop(page_id)
        region = self._regions.pop(page_id, None)
        if region is not None:
            self._space.free(*region)
            self._bytes -= region[1] * _BLOCK

    def __contains__(self, page_id: int) -> bool:
        return page_id in self._index

    def clear(self) -> None:
        """Forgets every page and gives the space back to the disk."""
        self._forget_all()
        if self._end.alive and self._owner == os.getpid():
            os.ftruncate(self._fd, 0)

    def close(self) -> None:
        """Removes the file."""
        self._forget_all()
        self._end()

    def _forget_all(self) -> None:
        self._index = RecordIndex(self._layout)
        self._regions = {}
        self._space = SlotAllocator()
        self._bytes = 0

    def _allocate(self, num_blocks: int) -> int:
        block = self._space.allocate(num_blocks)
        if block is None:
            self._space.grow(max(num_blocks, _GROWTH, self._space.num_slots // 8))
            block = self._space.allocate(num_blocks)
        assert block is not None
        return block

    def _read_direct(self, chunks: Chunks, target: Target) -> ReadFault | None:
        # [ first block .. start .. end .. last block ]: only whole blocks can be read, to an aligned place
        target.check(chunks.tokens, chunks.shape)
        largest = int(chunks.tokens.max(initial=0)) * chunks.shape.token_bytes
        bounce = np.frombuffer(
            _aligned(largest + 2 * _BLOCK), np.uint8
        )  # two threads may read at a time
        facts = zip(
            chunks.starts.tolist(), chunks.tokens.tolist(), chunks.checksums.tolist(), strict=True
        )
        for index, (start, count, want) in enumerate(facts):
            size = count * chunks.shape.token_bytes
            block = start // _BLOCK * _BLOCK
            length = -(-(start + size) // _BLOCK) * _BLOCK - block
            view = bounce[:length]
            try:
                got = os.preadv(self._fd, [view.data], block) - (start - block)
            except OSError as error:
                return ReadFault(index, error=error)
            if got < size:
                return ReadFault(index, bytes_got=max(0, got))
            chunk = view[start - block :][:size]
            if checksum(chunk) != want:
                return ReadFault(index)
            target.put(chunk, chunks.shape, count)
            target = target.after(count)
        return None

    def _refuse(self, page_id: int, size: int, layer: int, fault: ReadFault) -> NoReturn:
        if fault.error is not None:
            what = f"could not be read from {self.path}: {fault.error.strerror}"
        elif fault.bytes_got is not None:
            what = (
                f"is not whole in {self.path}: layer {layer} has {fault.bytes_got} of {size} bytes"
            )
        else:
            what = (
                f"is damaged in {self.path}: layer {layer} has another checksum than when written"
            )
        raise TierError(
            f"page {page_id} {what}. The text cannot go on from this cache. Check that disk, leave page files alone, "
            "and generate again."
        ) from fault.error


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
