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
class ReadFault:
    """A chunk that could not be read: its index, and an `OSError`, the bytes got, or neither for a wrong checksum."""

    index: int
    error: OSError | None = None
    bytes_got: int | None = None


def copy_chunks(addresses: np.ndarray, sizes: np.ndarray, out: np.ndarray) -> None:
    """Copies chunks at these addresses, int64, of these sizes, int64, one after the other to `out`."""
    _check_room(sizes, out)
    library = load_library()
    if library is not None:
        library.oval_copy_chunks(len(sizes), _at(addresses), _at(sizes), _at(out))
        return
    place = _at(out)
    for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(place, address, size)
        place += size


def read_chunks(
    fd: int, offsets: np.ndarray, sizes: np.ndarray, checksums: np.ndarray, out: np.ndarray
) -> ReadFault | None:
    """Reads chunks of a file one after the other to `out`, and checks them.

    Args:
        fd: the file.
        offsets: int64, where each starts.
        sizes: int64, its bytes.
        checksums: uint64, its XXH64.
        out: uint8.
    Returns:
        The first chunk that is wrong, or None.
    """
    _check_room(sizes, out)
    library = load_library()
    if library is None:
        return _read_by_piece(fd, offsets, sizes, checksums, out)
    why = ctypes.c_int64(0)
    done = library.oval_read_chunks(
        fd, len(sizes), _at(offsets), _at(sizes), _at(checksums), _at(out), ctypes.byref(why)
    )
    if done == len(sizes):
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
    library.oval_copy_chunks.argtypes = [_COUNT, *[_POINTER] * 3]
    library.oval_copy_chunks.restype = None
    library.oval_read_chunks.argtypes = [ctypes.c_int, _COUNT, *[_POINTER] * 5]
    library.oval_read_chunks.restype = _COUNT
    data = np.arange(1, 200, dtype=np.uint8)
    lengths = (0, 1, 4, 7, 8, 31, 32, 33, 100, len(data))
    right = all(library.oval_checksum(_at(data), n) == checksum(data[:n]) for n in lengths)
    return library if right else None


def _read_by_piece(
    fd: int, offsets: np.ndarray, sizes: np.ndarray, checksums: np.ndarray, out: np.ndarray
) -> ReadFault | None:
    start = 0
    pieces = zip(offsets.tolist(), sizes.tolist(), checksums.tolist(), strict=True)
    for index, (offset, size, want) in enumerate(pieces):
        piece = out[start : start + size]
        try:
            got = os.preadv(fd, [piece.data], offset)
        except OSError as error:
            return ReadFault(index, error=error)
        if got != size:
            return ReadFault(index, bytes_got=got)
        if checksum(piece) != want:
            return ReadFault(index)
        start += size
    return None


def _at(array: np.ndarray) -> int:
    """Returns an array's address; faster than `array.ctypes`."""
    address: int = array.__array_interface__["data"][0]
    return address


def _check_room(sizes: np.ndarray, out: np.ndarray) -> None:
    assert out.dtype == np.uint8 and out.flags.c_contiguous, "not plain bytes"  # noqa: PT018
    assert int(sizes.sum()) <= out.nbytes, "the buffer is too small"
