"""Moves chunks of pages into a buffer: in C in one call, or piece by piece where there is no compiler.

Why C: a worker that copies a few kB at a time takes and gives Python's lock for each piece, and the thread that
computes waits for it a thousand times a token.
"""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class Target:
    """Bytes that hold K [heads][total tokens], then V, and the place at which the next token goes.

    Attributes:
        out: uint8, contiguous.
        total: tokens that `out` is divided for.
        first: place of the next token, 0 at the start.
    """

    out: np.ndarray
    total: int
    first: int = 0

    def after(self, num_tokens: int) -> Target:
        """Returns the same bytes with the place behind `num_tokens` more."""
        return replace(self, first=self.first + num_tokens)

    def put(self, chunk: np.ndarray, shape: ChunkShape, tokens: int) -> None:
        """Puts a chunk, [heads][tokens] keys, then values, at the place."""
        start = done = 0
        for width in (shape.key_bytes, shape.value_bytes):
            size = shape.heads * tokens * width
            wide = self.out[start : start + shape.heads * self.total * width]
            part = chunk[done : done + size].reshape(shape.heads, -1)
            at = slice(self.first * width, (self.first + tokens) * width)
            wide.reshape(shape.heads, -1)[:, at] = part
            start += wide.nbytes
            done += size

    def check(self, tokens: np.ndarray, shape: ChunkShape) -> None:
        """Raises AssertionError unless chunks of so many tokens fit."""
        plain = self.out.dtype == np.uint8 and self.out.flags.c_contiguous
        assert plain, "not plain bytes"
        assert self.first + int(tokens.sum()) <= self.total, "more tokens than there are places"
        assert self.total * shape.token_bytes <= self.out.nbytes, "the buffer is too small"


def copy_chunks(
    addresses: np.ndarray, tokens: np.ndarray, shape: ChunkShape, target: Target
) -> None:
    """Copies chunks of pages into K and V of many tokens.

    Args:
        addresses: int64, where each chunk lies: [heads][tokens] keys, then values.
        tokens: int64, tokens of each.
        shape: of a token.
        target: where they go, one behind the other.
    """
    target.check(tokens, shape)
    library = load_library()
    if library is not None:
        library.oval_copy_chunks(
            len(tokens), _at(addresses), _at(tokens), shape.heads, shape.key_bytes, shape.value_bytes,
            target.first, target.total, _at(target.out),
        )  # fmt: skip
        return
    for address, count in zip(addresses.tolist(), tokens.tolist(), strict=True):
        size = count * shape.token_bytes
        chunk = np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)
        target.put(chunk, shape, count)
        target = target.after(count)


def read_chunks(
    fd: int,
    offsets: np.ndarray,
    tokens: np.ndarray,
    checksums: np.ndarray,
    shape: ChunkShape,
    target: Target,
) -> ReadFault | None:
    """Reads chunks of a file likewise, and checks them.

    Args:
        fd: the file.
        offsets: int64, where each chunk starts.
        tokens: int64, tokens of each.
        checksums: uint64, XXH64 of each.
        shape: of a token.
        target: as in `copy_chunks`.
    Returns:
        The first chunk that is wrong, or None.
    """
    target.check(tokens, shape)
    library = load_library()
    scratch = np.empty(int(tokens.max(initial=0)) * shape.token_bytes, np.uint8)
    if library is None:
        return _read_by_piece(fd, offsets, tokens, checksums, shape, scratch, target)
    why = ctypes.c_int64(0)
    done = library.oval_read_chunks(
        fd, len(tokens), _at(offsets), _at(tokens), _at(checksums),
        shape.heads, shape.key_bytes, shape.value_bytes, target.first, target.total,
        _at(scratch), _at(target.out), ctypes.byref(why),
    )  # fmt: skip
    if done == len(tokens):
        return None
    if why.value > 0:
        return ReadFault(done, error=OSError(why.value, os.strerror(why.value)))
    return ReadFault(done, bytes_got=-1 - why.value if why.value < 0 else None)


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
    library.oval_copy_chunks.argtypes = [_COUNT, _POINTER, _POINTER, *[_COUNT] * 5, _POINTER]
    library.oval_copy_chunks.restype = None
    library.oval_read_chunks.argtypes = [
        ctypes.c_int, _COUNT, *[_POINTER] * 3, *[_COUNT] * 5, *[_POINTER] * 3
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
    target: Target,
) -> ReadFault | None:
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
        target.put(piece, shape, count)
        target = target.after(count)
    return None


def _at(array: np.ndarray) -> int:
    """Returns an array's address; faster than `array.ctypes`."""
    address: int = array.__array_interface__["data"][0]
    return address
