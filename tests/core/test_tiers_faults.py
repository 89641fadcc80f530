"""Disks that are full, files that are cut, changed or gone: the right answer, or an error that names page and file."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from core.tier_twin import TierTwin, away_ids, check_buffers, disk_of

from oval_core.errors import ConfigError, TierError
from oval_core.native import chunk_io
from oval_core.tiers import disk_store

READERS = ["c", "python", "direct"]
SMALL = {"fast_tokens": 96, "sink_tokens": 4, "recent_tokens": 8, "prefetch": "none"}


@pytest.fixture(params=READERS)
def disk_twin(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TierTwin]:
    """A cache with pages on disk, read by each of the three ways."""
    if request.param == "python":
        monkeypatch.setattr(chunk_io, "load_library", lambda: None)
    elif request.param == "c" and chunk_io.load_library() is None:
        pytest.skip("no C compiler")
    tiers = {**SMALL, "disk": str(tmp_path), "direct_io": request.param == "direct"}
    if request.param == "direct":
        require_direct(tmp_path)
    twin = TierTwin(tiers).fill()
    twin.forward([1])  # so that the next token needs no room: a fault meets reads, not writes
    yield twin
    twin.cache.close()


def require_direct(folder: Path) -> None:
    probe = folder / "probe"
    with probe.open("wb") as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
        except (OSError, AttributeError) as error:
            pytest.skip(f"the file system of {folder} knows no O_DIRECT: {error}")
    probe.unlink()


def refused(twin: TierTwin, call: Callable[[], object]) -> str:
    """The message of the error that a call must raise; nothing changes."""
    with pytest.raises(TierError) as caught:
        call()
    twin.cache.abort()
    twin.cache.tiers.check_integrity()
    message = str(caught.value)
    assert str(disk_of(twin.cache).path) in message
    return message


def region_of(twin: TierTwin, page_id: int) -> int:
    """Offset of a page's record."""
    return disk_of(twin.cache)._regions[page_id][0] * 4096


@contextmanager
def changed_byte(path: Path, at: int, mask: int) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR)
    old = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([old[0] ^ mask]), at)
    try:
        yield
    finally:
        os.pwrite(fd, old, at)
        os.close(fd)


def works(twin: TierTwin) -> None:
    for _ in range(2):
        twin.forward([1])
    twin.check_all()
    check_buffers(twin.cache)


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_bit_flipped(disk_twin: TierTwin, layer: int, bit: int) -> None:
    twin = disk_twin
    page_id, layout = away_ids(twin.cache)[3], twin.cache.tiers.slow._layout
    chunk = layout.chunk(layer, 4)
    for at in (chunk.start, chunk.stop - 1):
        with changed_byte(disk_of(twin.cache).path, region_of(twin, page_id) + at, 1 << bit):
            message = refused(twin, lambda: twin.forward([1]))
            assert f"page {page_id} is damaged" in message
            assert f"layer {layer} " in message
            assert "page" in refused(twin, lambda: twin.cache.gather(layer, 0))
    works(twin)


def test_a_damaged_page_is_not_brought_back_to_be_changed(disk_twin: TierTwin) -> None:
    twin = disk_twin
    page = next(p for p in twin.cache.table.pages() if p.page_id == away_ids(twin.cache)[1])
    length = page.tokens[0] + 2
    with changed_byte(disk_of(twin.cache).path, region_of(twin, page.page_id) + 5, 1):
        message = refused(twin, lambda: twin.cache.truncate([length]))
        assert f"page {page.page_id} is damaged" in message
        with pytest.raises(TierError, match=f"page {page.page_id} is damaged"):
            twin.cache.clone()
    assert twin.cache.table.sequences[0].length == twin.lengths[0]
    twin.truncate([length])
    works(twin)


@pytest.mark.parametrize("kept", [0, 1, 100, 4096 + 17])
def test_a_file_cut_short(disk_twin: TierTwin, kept: int) -> None:
    twin = disk_twin
    store = disk_of(twin.cache)
    size = store.path.stat().st_size
    whole = store.path.read_bytes()
    os.truncate(store.path, kept)
    message = refused(twin, lambda: twin.forward([1]))
    assert "is not whole" in message or "is damaged" in message
    assert "page " in message
    store.path.write_bytes(whole)
    assert store.path.stat().st_size == size
    works(twin)


def test_a_read_error_of_the_disk(disk_twin: TierTwin) -> None:
    """The descriptor is bent to one that cannot be read: a real error of the system."""
    twin = disk_twin
    fd = disk_of(twin.cache)._fd
    kept, write_only = os.dup(fd), os.open(os.devnull, os.O_WRONLY)
    os.dup2(write_only, fd)
    try:
        message = refused(twin, lambda: twin.forward([1]))
    finally:
        os.dup2(kept, fd)
        os.close(kept)
        os.close(write_only)
    assert f"could not be read from {disk_of(twin.cache).path}: Bad file descriptor" in message
    works(twin)


def test_a_file_deleted_under_us(disk_twin: TierTwin) -> None:
    twin = disk_twin
    disk_of(twin.cache).path.unlink()
    twin.fill(pages=16)
    works(twin)
    twin.cache.close()


WAYS = ["disk", "spill", "direct"]


def full_disk_twin(way: str, folder: Path) -> TierTwin:
    extra: dict[str, Any] = {"host_tokens": 12} if way == "spill" else {}
    if way == "direct":
        require_direct(folder)
        extra["direct_io"] = True
    return TierTwin({**SMALL, "disk": str(folder), **extra}).fill()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fails_after", [0, 1, 2])
def test_a_disk_that_is_full(
    way: str, fails_after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost, whatever was written before; with room again all goes on."""
    twin = full_disk_twin(way, tmp_path)
    store, real, calls = disk_of(twin.cache), os.pwrite, [0]

    def full(fd: int, data: Any, at: int) -> int:
        calls[0] += 1
        if calls[0] <= fails_after:
            return real(fd, data, at)
        if calls[0] == fails_after + 1 and way != "direct":
            return real(fd, data[: len(data) // 2], at)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    used, pages = store._space.num_used, twin.cache.tiers.residency.page_ids | set()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        message = refused(twin, lambda: twin.forward([32]))
        assert "No space left on device" in message
        assert "Make room" in message
        assert store._space.num_used <= used + fails_after
        assert pages <= twin.cache.tiers.residency.page_ids | set(away_ids(twin.cache))
        twin.check()
        refused(twin, lambda: twin.forward([32]))
    twin.forward([32])
    works(twin)
    twin.cache.close()


@pytest.mark.parametrize("way", ["disk", "spill"])
def test_a_device_that_is_really_full(way: str, tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.is_char_device():
        pytest.skip("no /dev/full")
    twin = full_disk_twin(way, tmp_path)
    fd = disk_of(twin.cache)._fd
    kept, device = os.dup(fd), os.open(full, os.O_RDWR)
    os.dup2(device, fd)
    try:
        assert "No space left on device" in refused(twin, lambda: twin.forward([32]))
    finally:
        os.dup2(kept, fd)
        os.close(kept)
        os.close(device)
    twin.forward([32])
    works(twin)
    twin.cache.close()


def test_a_clone_that_finds_the_disk_full_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = full_disk_twin("disk", tmp_path)

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(TierError, match="No space left"):
            twin.cache.clone()
    gc.collect()
    assert list(tmp_path.glob("*.pages")) == [disk_of(twin.cache).path]
    works(twin)


@pytest.mark.parametrize("kind", ["below a file", "read only", "a file"])
def test_a_folder_that_cannot_be_written_is_refused_at_the_door(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "there"
    if kind == "read only":
        folder.mkdir(mode=0o500)
        if os.access(folder, os.W_OK):
            pytest.skip("this user (root?) writes where nobody may")
    else:
        folder.write_text("")
        folder = folder / "below" if kind == "below a file" else folder
    with pytest.raises(ConfigError, match=r"tiers\.disk: got .*there.*Allowed: .*Name another"):
        TierTwin({**SMALL, "disk": str(folder)})


def test_no_direct_io_on_this_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(fd: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, flags)

    real = fcntl.fcntl
    monkeypatch.setattr(fcntl, "fcntl", refuses)
    with pytest.raises(TierError, match=r"direct I/O is not there.*direct_io out"):
        TierTwin({**SMALL, "disk": str(tmp_path), "direct_io": True}).fill()
    gc.collect()
    assert not list(tmp_path.glob("*.pages")), "a file was left behind"


def test_no_file_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(folder: Path) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(disk_store.page_files, "create", refuses)
    twin = TierTwin({**SMALL, "disk": str(tmp_path)})
    with pytest.raises(TierError, match=r"no page file.*Too many open files.*tiers\.disk"):
        twin.fill()
    twin.cache.abort()
    twin.check()


def test_main_memory_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = TierTwin({**SMALL}).fill()
    real = torch.empty

    def refuses(*args: Any, **facts: Any) -> Any:
        if "pin_memory" in facts:
            raise RuntimeError("no memory")
        return real(*args, **facts)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuses)
        with pytest.raises(TierError, match=r"page \d+: main memory has no \d+ bytes"):
            twin.forward([32])
        twin.cache.abort()
        twin.check()
    twin.forward([32])
    works(twin)
