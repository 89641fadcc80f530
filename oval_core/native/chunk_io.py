"""Moves chunks of pages into a buffer: in C in one call, or piece by piece where there is no compiler.

Why C: a worker that copies a few kB at a time takes and gives Python's lock for each piece, and the thread that
computes waits for it a thousand times a token.
"""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass

import numpy as np
import xxhash

from oval_core.errors import BackendUnavailableError
from oval_core.native.build import build_library

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64


def checksum(data: np.ndarray) -> int:
    """Returns the XXH64 of contiguous bytes."""
    return xxhash.xxh64_intdigest(data.data)


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """One layer's K and V in bytes: KV heads, and what one token's key and value take in one head."""

    heads: int
    key_bytes: int
    value_bytes: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.heads * (self.key_bytes + self.value_bytes)


@dataclass(frozen=True, slots=True)
class ReadFault:
    """A chunk that could not be read: its index, and an `OSError`, the bytes got, or neither for a wrong checksum."""

    index: int
    error: OSError | None = None
    bytes_got: int | None = None


def copy_chunks(
    addresses: np.ndarray, tokens: np.ndarray, shape: ChunkShape, out: np.ndarray
) -> None:
    """Copies chunks of pages to K and V of all their tokens.

    Args:
        addresses: int64, where each chunk lies: [heads][tokens] keys, then values.
        tokens: int64, tokens of each.
        shape: of a token.
        out: uint8, K [heads][all tokens], then V.
    """
    total = _check_room(tokens, shape, out)
    library = load_library()
    if library is not None:
        facts = (shape.heads, shape.key_bytes, shape.value_bytes)
        library.oval_copy_chunks(len(tokens), _at(addresses), _at(tokens), *facts, _at(out))
        return
    first = 0
    for address, count in zip(addresses.tolist(), tokens.tolist(), strict=True):
        size = count * shape.token_bytes
        chunk = np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)
        scatter(chunk, shape, count, first, total, out)
        first += count


def read_chunks(
    fd: int,
    offsets: np.ndarray,
    tokens: np.ndarray,
    checksums: np.ndarray,
    shape: ChunkShape,
    out: np.ndarray,
) -> ReadFault | None:
    """Reads chunks of a file likewise, and checks them.

    Args:
        fd: the file.
        offsets: int64, where each chunk starts.
        tokens: int64, tokens of each.
        checksums: uint64, XXH64 of each.
        shape: of a token.
        out: as in `copy_chunks`.
    Returns:
        The first chunk that is wrong, or None.
    """
    total = _check_room(tokens, shape, out)
    library = load_library()
    scratch = np.empty(int(tokens.max(initial=0)) * shape.token_bytes, np.uint8)
    if library is None:
        return _read_by_piece(fd, offsets, tokens, checksums, shape, scratch, total, out)
    why = ctypes.c_int64(0)
    done = library.oval_read_chunks(
        fd, len(tokens), _at(offsets), _at(tokens), _at(checksums),
        shape.heads, shape.key_bytes, shape.value_bytes, _at(scratch), _at(out), ctypes.byref(why),
    )  # fmt: skip
    if done == len(tokens):
        return None
    if why.value > 0:
        return ReadFault(done, error=OSError(why.value, os.strerror(why.value)))
    return ReadFault(done, bytes_got=-1 - why.value if why.value < 0 else None)


def scatter(
    chunk: np.ndarray, shape: ChunkShape, tokens: int, first: int, total: int, out: np.ndarray
) -> None:
    """Puts a chunk of `tokens` tokens into K and V of `total` tokens, the first of them at place `first`."""
    start = done = 0
    for width in (shape.key_bytes, shape.value_bytes):
        size = shape.heads * tokens * width
        wide = out[start : start + shape.heads * total * width].reshape(shape.heads, -1)
        part = chunk[done : done + size].reshape(shape.heads, -1)
        wide[:, first * width : (first + tokens) * width] = part
        start += shape.heads * total * width
        done += size


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """Returns the compiled library, checked against `xxhash`; None where it cannot be had."""
    try:
        library = ctypes.CDLL(str(build_library("chunks", {})))
    except (BackendUnavailableError, OSError):
        return None
    library.oval_checksum.argtypes, library.oval_checksum.restype = (
        [_POINTER, _COUNT],
        ctypes.c_uint64,
    )
    library.oval_copy_chunks.argtypes = [_COUNT, _POINTER, _POINTER, *[_COUNT] * 3, _POINTER]
    library.oval_copy_chunks.restype = None
    library.oval_read_chunks.argtypes = [
        ctypes.c_int, _COUNT, *[_POINTER] * 3, *[_COUNT] * 3, *[_POINTER] * 3
    ]  # fmt: skip
    library.oval_read_chunks.restype = _COUNT
    data = np.arange(1, 200, dtype=np.uint8)
    lengths = (0, 1, 4, 7, 8, 31, 32, 33, 100, len(data))
    right = all(library.oval_checksum(_at(data), n) == checksum(data[:n]) for n in lengths)
    return library if right else None


def _read_by_piece(
    fd: int,
    offsets: np.ndarray,
    tokens: np.ndarray,
    checksums: np.ndarray,
    shape: ChunkShape,
    scratch: np.ndarray,
    total: int,
    out: np.ndarray,
) -> ReadFault | None:
    first = 0
    facts = zip(offsets.tolist(), tokens.tolist(), checksums.tolist(), strict=True)
    for index, (offset, count, want) in enumerate(facts):
        piece = scratch[: count * shape.token_bytes]
        try:
            got = os.preadv(fd, [piece.data], offset)
        except OSError as error:
            return ReadFault(index, error=error)
        if got != piece.nbytes:
            return ReadFault(index, bytes_got=got)
        if checksum(piece) != want:
            return ReadFault(index)
        scatter(piece, shape, count, first, total, out)
        first += count
    return None


def _at(array: np.ndarray) -> int:
    """Returns an array's address; faster than `array.ctypes`."""
    address: int = array.__array_interface__["data"][0]
    return address


def _check_room(tokens: np.ndarray, shape: ChunkShape, out: np.ndarray) -> int:
    total = int(tokens.sum())
    assert out.dtype == np.uint8 and out.flags.c_contiguous, "not plain bytes"  # noqa: PT018
    assert total * shape.token_bytes <= out.nbytes, "the buffer is too small"
    return total
