"""Chunks of pages against numpy, in C and piece by piece, and the index that says where they are."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from oval_core.native import chunk_io
from oval_core.native.chunk_io import ChunkShape, Target, checksum, copy_chunks, read_chunks
from oval_core.tiers.disk_store import DiskStore
from oval_core.tiers.page_store import HostStore
from oval_core.tiers.record import LayerShape, RecordLayout, pack, unpack
from oval_core.tiers.record_index import RecordIndex
from oval_core.tiers.spill_store import SpillStore

needs_c = pytest.mark.skipif(chunk_io.load_library() is None, reason="no C compiler")
WAYS = [pytest.param("c", marks=needs_c), "python"]
QUICK = settings(max_examples=40, deadline=None, derandomize=True)

SHAPES = st.builds(ChunkShape, st.integers(1, 4), st.integers(1, 24), st.integers(1, 24))
COUNTS = st.lists(st.integers(1, 33), min_size=1, max_size=7)


def random_chunks(shape: ChunkShape, counts: Sequence[int], seed: int) -> list[np.ndarray]:
    dice = np.random.default_rng(seed)
    return [dice.integers(0, 256, n * shape.token_bytes).astype(np.uint8) for n in counts]


def sides(chunk: np.ndarray, shape: ChunkShape, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """K [heads, tokens, bytes] and V of a chunk."""
    split = shape.heads * tokens * shape.key_bytes
    keys = chunk[:split].reshape(shape.heads, tokens, shape.key_bytes)
    return keys, chunk[split:].reshape(shape.heads, tokens, shape.value_bytes)


def wanted(
    chunks: Sequence[np.ndarray], shape: ChunkShape, counts: Sequence[int], spare: tuple[int, int]
) -> np.ndarray:
    """All chunks as one, between `spare` tokens of 7s."""
    before, after = (np.full(n * shape.token_bytes, 7, np.uint8) for n in spare)
    parts = [sides(c, shape, n) for c, n in zip(chunks, counts, strict=True)]
    parts = [sides(before, shape, spare[0]), *parts, sides(after, shape, spare[1])]
    whole = [np.concatenate(side, 1).ravel() for side in zip(*parts, strict=True)]
    return np.concatenate(whole)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


def choose(way: str, patch: pytest.MonkeyPatch) -> None:
    if way == "python":
        patch.setattr(chunk_io, "load_library", lambda: None)


@pytest.mark.parametrize("way", WAYS)
@QUICK
@given(shape=SHAPES, counts=COUNTS, spare=st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_copies_equal_numpy(
    way: str, shape: ChunkShape, counts: list[int], spare: tuple[int, int]
) -> None:
    chunks = random_chunks(shape, counts, len(counts))
    total = sum(counts) + sum(spare)
    out = np.full(total * shape.token_bytes + 5, 7, np.uint8)
    addresses = np.array([chunk.ctypes.data for chunk in chunks], np.int64)
    with pytest.MonkeyPatch.context() as patch:
        choose(way, patch)
        copy_chunks(addresses, np.array(counts, np.int64), shape, Target(out, total, spare[0]))
    assert np.array_equal(out[:-5], wanted(chunks, shape, counts, spare))
    assert (out[-5:] == 7).all(), "written behind the end"


@pytest.mark.parametrize("way", WAYS)
@QUICK
@given(
    shape=SHAPES,
    counts=COUNTS,
    spare=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    harm=st.sampled_from(["", "flip", "cut", "descriptor"]),
    data=st.data(),
)
def test_reads_equal_numpy_or_say_what_is_wrong(
    way: str,
    shape: ChunkShape,
    counts: list[int],
    spare: tuple[int, int],
    harm: str,
    data: st.DataObject,
) -> None:
    chunks = random_chunks(shape, counts, 3)
    gaps = np.cumsum([0] + [c.nbytes + 3 for c in chunks[:-1]]) + 11
    total = sum(counts) + sum(spare)
    out = np.full(total * shape.token_bytes, 7, np.uint8)
    bad = data.draw(st.integers(0, len(chunks) - 1))
    at = data.draw(st.integers(0, chunks[bad].nbytes - 1))
    sums = np.array([checksum(chunk) for chunk in chunks], np.uint64)
    with tempfile.TemporaryFile() as file, pytest.MonkeyPatch.context() as patch:
        choose(way, patch)
        fd = file.fileno()
        for start, chunk in zip(gaps, chunks, strict=True):
            os.pwrite(fd, chunk.data, int(start))
        if harm == "flip":
            byte = chunks[bad][at] ^ (1 << data.draw(st.integers(0, 7)))
            os.pwrite(fd, bytes([byte]), int(gaps[bad]) + at)
        elif harm == "cut":
            os.ftruncate(fd, int(gaps[bad]) + at)
        numbers = np.array(counts, np.int64)
        fault = read_chunks(
            -1 if harm == "descriptor" else fd,
            gaps.astype(np.int64),
            numbers,
            sums,
            shape,
            Target(out, total, spare[0]),
        )
    if not harm:
        assert fault is None
        assert np.array_equal(out, wanted(chunks, shape, counts, spare))
        return
    assert fault is not None
    assert fault.index == (0 if harm == "descriptor" else bad)
    assert fault.bytes_got == (at if harm == "cut" else None)
    assert (fault.error is not None) == (harm == "descriptor")
    assert fault.error is None or fault.error.errno == 9


def test_targets_that_are_too_small_are_refused(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(way, monkeypatch)
    shape = ChunkShape(2, 3, 4)
    chunk = random_chunks(shape, [4], 0)[0]
    where, tokens = np.array([chunk.ctypes.data], np.int64), np.array([4], np.int64)
    short, odd = np.zeros(4 * shape.token_bytes - 1, np.uint8), np.zeros(99, np.uint16)
    whole = np.zeros(8 * shape.token_bytes, np.uint8)
    for target in (
        Target(short, 4),
        Target(odd, 4),
        Target(whole, 3),
        Target(whole, 8, 5),
        Target(whole[::2], 4),
    ):
        with pytest.raises(AssertionError):
            copy_chunks(where, tokens, shape, target)
        with pytest.raises(AssertionError):
            read_chunks(0, where, tokens, np.zeros(1, np.uint64), shape, target)


@needs_c
@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.binary(max_size=300), st.integers(0, 7))
def test_the_checksum_is_xxh64(data: bytes, skip: int) -> None:
    view = np.frombuffer(data + b"12345678", np.uint8)[skip:]
    library = chunk_io.load_library()
    assert checksum(view) == xxhash.xxh64_intdigest(view.tobytes())
    assert library.oval_checksum(view.ctypes.data, len(view)) == checksum(view)


@needs_c
@pytest.mark.parametrize("size", [1 << 12, 54321, 1 << 18])
def test_the_checksum_of_long_data(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    assert chunk_io.load_library().oval_checksum(data.ctypes.data, size) == checksum(data)


def test_a_library_that_sums_wrongly_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk_io.load_library.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(chunk_io, "checksum", lambda data: 1)
        assert chunk_io.load_library() is None
    chunk_io.load_library.cache_clear()


LAYOUT = RecordLayout([LayerShape(2, 3, 4, torch.float32), LayerShape(1, 5, 2, torch.bfloat16)])


def record_of(page_id: int, count: int) -> np.ndarray:
    dice = np.random.default_rng(page_id)
    return dice.integers(0, 256, LAYOUT.token_bytes * count).astype(np.uint8)


def test_packed_pages_come_back() -> None:
    shape = LAYOUT.shapes[0]
    keys, values = torch.randn(2, 3 * 5, 3), torch.randn(2, 3 * 5, 4)
    rows = pack(3, keys, values)
    assert rows.shape == (3, 5 * shape.token_bytes)
    for page, row in enumerate(rows):
        store = unpack(shape, torch.from_numpy(row.copy()))
        assert torch.equal(store.keys, keys[:, 5 * page : 5 * page + 5])
        assert torch.equal(store.values, values[:, 5 * page : 5 * page + 5])


def test_an_index_knows_what_was_added_last() -> None:
    index = RecordIndex(LAYOUT)
    for page_id, count in ((4, 3), (9, 2), (1, 7)):
        index.add(page_id, 1000 * page_id, count, [page_id, 2**64 - page_id])
    assert index.oldest() == 4
    first = index.chunks(1, [9, 1])
    assert index.chunks(1, (9, 1)).starts.tolist() == first.starts.tolist()
    before = LAYOUT.bytes_before(1)
    assert first.starts.tolist() == [9000 + 2 * before, 1000 + 7 * before]
    assert first.tokens.tolist() == [2, 7]
    assert first.checksums.tolist() == [2**64 - 9, 2**64 - 1]
    assert first.checksums.flags.c_contiguous
    assert index.chunks(0, [1, 9]).starts.tolist() == [1000, 9000]
    assert index.drop(4) == 3
    assert index.drop(4) is None
    assert index.oldest() == 9
    index.drop(9)
    index.add(9, 5, 1, [1, 2])
    assert index.chunks(1, [9, 1]).starts.tolist() == [5 + before, 1000 + 7 * before]
    assert index.oldest() == 1
    assert (index.num_tokens(9), 9 in index, 4 in index) == (1, True, False)
    with pytest.raises(KeyError):
        index.chunks(0, [4])


def test_an_index_remembers_no_more_than_it_may() -> None:
    index = RecordIndex(LAYOUT)
    for page_id in range(1, 200):
        index.add(page_id, page_id, 1)
        assert index.chunks(0, [page_id]).starts.tolist() == [page_id]
    assert len(index._groups) <= 64


@pytest.mark.parametrize("kind", ["host", "disk", "direct", "spill"])
def test_a_store_gives_back_what_it_was_given(kind: str, tmp_path: Path) -> None:
    host = HostStore(LAYOUT, pinned=False)
    store = host
    if kind != "host":
        disk = DiskStore(LAYOUT, tmp_path, direct_io=kind == "direct")
        store = SpillStore(host, disk, 20) if kind == "spill" else disk
    held: dict[int, int] = {}
    dice = np.random.default_rng(1)
    for page_id in range(1, 60):
        count = int(dice.integers(1, 33))
        store.put(page_id, count, record_of(page_id, count))
        held[page_id] = count
        if page_id % 3 == 0:
            gone = int(dice.choice(list(held)))
            store.drop(gone)
            store.drop(gone)
            del held[gone]
        asked = [int(p) for p in dice.permutation(list(held))[:6]]
        for layer, shape in enumerate(LAYOUT.shapes):
            total = sum(held[p] for p in asked)
            out = np.zeros(total * shape.token_bytes, np.uint8)
            store.read(layer, asked, Target(out, total))
            chunks = [record_of(p, held[p])[LAYOUT.chunk(layer, held[p])] for p in asked]
            counts = [held[p] for p in asked]
            assert np.array_equal(out, wanted(chunks, shape.in_bytes, counts, (0, 0)))
        assert all(page in store for page in held)
        assert store.bytes_stored >= sum(held.values()) * LAYOUT.token_bytes
    for page_id, count in held.items():
        assert np.array_equal(store.read_record(page_id), record_of(page_id, count))
        assert store.num_tokens(page_id) == count
    if kind == "spill":
        assert store._tokens == sum(n for p, n in held.items() if p in host) <= 20
    for page_id in list(held):
        store.drop(page_id)
    assert store.bytes_stored == 0
    store.clear()
    store.close()
    store.close()
    assert not list(tmp_path.glob("*.pages"))
