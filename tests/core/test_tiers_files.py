"""Page files, threads and descriptors: whose they are, when they go, and what a crash leaves."""

from __future__ import annotations

import gc
import os
import signal
import stat
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from core.tier_twin import TierTwin, disk_of, prefetcher_of, stream_of, wait_idle

from oval_core.tiers import page_files

SMALL = {"fast_tokens": 96, "sink_tokens": 4, "recent_tokens": 8}
WITHIN_S = 20.0

CHILD = """
import sys
sys.path[:0] = {path!r}
from core.tier_twin import TierTwin, disk_of
twin = TierTwin({{"fast_tokens": 96, "disk": {folder!r}}}).fill()
twin.forward([1])
twin.check()
print(disk_of(twin.cache).path, flush=True)
if {waits}:
    sys.stdin.read()
"""


def start_child(folder: Path, waits: bool) -> tuple[subprocess.Popen[str], Path]:
    tests = Path(__file__).parent.parent
    source = CHILD.format(path=[str(tests), *sys.path], folder=str(folder), waits=waits)
    child = subprocess.Popen(
        [sys.executable, "-c", source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OVAL_CACHE": str(folder / "home")},
    )
    assert child.stdout is not None
    line = child.stdout.readline().strip()
    assert line, child.communicate()[1]
    return child, Path(line)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def threads() -> int:
    return sum(thread.name == "oval-prefetch" for thread in threading.enumerate())


def files_in(folder: Path) -> set[Path]:
    return set(folder.glob("*.pages"))


def test_two_processes_in_one_folder_and_a_crash(tmp_path: Path) -> None:
    twin = TierTwin({**SMALL, "disk": str(tmp_path)}).fill()
    mine = disk_of(twin.cache).path
    child, theirs = start_child(tmp_path, waits=True)
    try:
        assert files_in(tmp_path) == {mine, theirs}
        assert page_files.leftovers(tmp_path) == []
        assert page_files.clean(tmp_path) == []
        assert files_in(tmp_path) == {mine, theirs}
        os.kill(child.pid, signal.SIGKILL)
        child.wait(WITHIN_S)
    finally:
        child.kill()
        child.communicate()
    found = page_files.leftovers(tmp_path)
    assert [left.path for left in found] == [theirs]
    assert found[0].num_bytes == theirs.stat().st_blocks * 512 > 0
    assert page_files.clean(tmp_path) == found
    assert files_in(tmp_path) == {mine}
    assert page_files.leftovers(tmp_path) == []
    twin.forward([1])
    twin.check_all()
    twin.cache.close()
    assert not files_in(tmp_path)


def test_the_end_of_the_interpreter_removes_the_file(tmp_path: Path) -> None:
    child, path = start_child(tmp_path, waits=False)
    _, err = child.communicate(timeout=WITHIN_S)
    assert child.returncode == 0, err
    assert err == ""
    assert not path.exists()
    assert not files_in(tmp_path)


@pytest.mark.parametrize("way", ["exit", "close", "collect"])
def test_a_forked_child_leaves_the_parents_file(way: str, tmp_path: Path) -> None:
    twin = TierTwin({**SMALL, "disk": str(tmp_path)}).fill()
    path, size = disk_of(twin.cache).path, disk_of(twin.cache).path.stat().st_size
    wait_idle(twin.cache)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork: that is the point
        pid = os.fork()
    if pid == 0:  # whatever happens here must not get back to pytest
        try:
            if way == "close":
                twin.cache.close()
            elif way == "collect":
                twin.cache = None
                gc.collect()
            else:
                disk_of(twin.cache)._end()
                prefetcher_of(twin.cache)._end()
        finally:
            os._exit(0 if path.exists() else 1)
    assert wait_for(pid) == 0
    assert path.stat().st_size == size
    assert page_files.leftovers(tmp_path) == [], "the lock went with the child"
    twin.forward([1])
    twin.check_all()
    twin.cache.close()


def wait_for(pid: int) -> int:
    end = time.monotonic() + 5.0
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the child hangs")


def test_a_forked_child_that_drops_its_copy_leaves_the_parents_bytes(tmp_path: Path) -> None:
    """Parent and child share one open file: what the child forgets, the parent still needs."""
    twin = TierTwin({**SMALL, "disk": str(tmp_path)}).fill()
    wait_idle(twin.cache)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            twin.cache.reset()
        finally:
            os._exit(0)
    assert wait_for(pid) == 0
    twin.forward([1])
    twin.check_all()
    twin.cache.close()


def test_a_cache_that_is_collected_takes_all_with_it(tmp_path: Path) -> None:
    gc.collect()
    before = open_files(), threads()
    for prefetch in ("none", "oracle"):
        twin = TierTwin({**SMALL, "disk": str(tmp_path), "prefetch": prefetch}).fill()
        assert (open_files(), threads()) == (before[0] + 1, before[1] + 1)
        assert len(files_in(tmp_path)) == 1
        loop = [twin]
        loop.append(loop)
        del twin, loop
        gc.collect()
        assert (open_files(), threads()) == before
        assert not files_in(tmp_path)


def test_each_cache_and_clone_has_a_file_of_its_own(tmp_path: Path) -> None:
    first = TierTwin({**SMALL, "disk": str(tmp_path)}).fill()
    second = TierTwin({**SMALL, "disk": str(tmp_path)}).fill()
    clone = first.cache.clone()
    paths = {disk_of(cache).path for cache in (first.cache, second.cache, clone)}
    assert files_in(tmp_path) == paths
    assert len(paths) == 3
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert str(os.getpid()) in path.name
    first.cache.close()
    first.check(clone)
    second.forward([1])
    second.check_all()
    clone.close()
    second.cache.close()
    assert not files_in(tmp_path)


def test_many_lives_leave_nothing(tmp_path: Path) -> None:
    gc.collect()
    before = open_files(), threads()
    prefetches = ("none", "oracle", "layer", "recent")
    for life in range(120):
        tiers = {"fast_tokens": 44, "disk": str(tmp_path), "prefetch": prefetches[life % 4]}
        if life % 3 == 0:
            tiers["host_tokens"] = 8
        twin = TierTwin({**tiers, "sink_tokens": 0, "recent_tokens": 0}, compares=False)
        for _ in range(4):
            twin.forward([8])
        assert twin.cache.tiers.num_away
        stream = stream_of(twin.cache)
        stream.drain()
        assert len(stream._free) == twin.cache.tiers.memory.num_buffers
        if life % 5 == 0:
            twin.reset()
        twin.cache.close()
    assert (open_files(), threads()) == before
    assert not files_in(tmp_path)


def test_a_reset_gives_the_disk_its_space_back(tmp_path: Path) -> None:
    twin = TierTwin({**SMALL, "disk": str(tmp_path)})
    for _ in range(3):
        twin.fill()
        store = disk_of(twin.cache)
        assert store.path.stat().st_size > store.bytes_stored - 4096 > 0
        twin.reset()
        assert store.path.stat().st_size == store.bytes_stored == store._space.num_used == 0
    twin.fill()
    rows = [1] * 3
    twin.reset()
    twin.fill(rows=3)
    used = store._space.num_used
    twin.truncate([len_ // 4 for len_ in twin.lengths])
    assert store._space.num_used < used
    twin.forward(rows)
    twin.check_all()
    twin.cache.close()


def test_other_files_are_never_touched(tmp_path: Path) -> None:
    others = [tmp_path / name for name in ("oval-1.txt", "x.pages", "oval-.pages.bak", "note")]
    for other in others:
        other.write_text("mine")
    target = tmp_path / "target"
    target.write_text("mine")
    link = tmp_path / "oval-9-link.pages"
    link.symlink_to(target)
    left = tmp_path / "oval-9-abc.pages"
    left.write_bytes(b"x" * 5000)
    assert [found.path for found in page_files.clean(tmp_path)] == [left]
    assert all(path.exists() for path in (*others, target))
    assert link.is_symlink()
    assert page_files.leftovers(tmp_path / "not there") == []


def test_folders_are_remembered_once(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    for _ in range(2):
        TierTwin({**SMALL, "disk": str(folder)}).fill().cache.close()
    assert page_files.known_folders().count(folder) == 1
    folder.rmdir()
    assert folder not in page_files.known_folders()


def test_a_long_list_forgets_folders_that_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_files, "cache_dir", lambda: tmp_path)
    listed = tmp_path / "page-folders.txt"
    kept = [tmp_path / name for name in ("a", "b")]
    for folder in kept:
        folder.mkdir()
    gone = "".join(f"{tmp_path}/gone-{number}\n" for number in range(1000))
    listed.write_text(f"{kept[0]}\n{gone}", encoding="utf-8")
    TierTwin({**SMALL, "disk": str(kept[1])}).fill().cache.close()
    assert listed.read_text(encoding="utf-8").splitlines() == [str(folder) for folder in kept]


def test_a_home_that_cannot_be_written_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(page_files, "cache_dir", lambda: tmp_path / "file" / "home")
    twin = TierTwin({**SMALL, "disk": str(tmp_path / "pages")}).fill()
    twin.check_all()
    twin.cache.close()
