"""A worker that fails or dies: who waits is told, within seconds, and the next forward has a new one."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from core.tier_twin import (
    TierTwin,
    check_buffers,
    check_totals,
    disk_of,
    prefetcher_of,
    wait_idle,
)

from oval_core.errors import TierError
from oval_core.tiers import prefetcher as prefetcher_module
from oval_core.tiers.transfer import Transfer
from oval_core.values import LayerSpec

TIERS = {"fast_tokens": 96, "sink_tokens": 4, "recent_tokens": 8}
WITHIN_S = 3.0


def kill(thread: threading.Thread) -> None:
    """Makes a thread raise SystemExit at its next step of Python."""
    ident = ctypes.c_ulong(thread.ident or 0)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit)) == 1


def worker_of(twin: TierTwin) -> threading.Thread:
    thread = prefetcher_of(twin.cache)._shared.thread
    assert thread is not None
    return thread


def fails_soon(twin: TierTwin) -> TierError:
    """One forward that must raise in time; the twin is then as before."""
    begin = time.monotonic()
    with pytest.raises(TierError) as caught:
        twin.forward([1])
    assert time.monotonic() - begin < WITHIN_S
    twin.cache.abort()
    return caught.value


def works(twin: TierTwin) -> None:
    for _ in range(2):
        twin.forward([1])
    twin.check_all()
    check_buffers(twin.cache)


@pytest.mark.parametrize(
    "error",
    [SystemExit(3), KeyboardInterrupt(), OSError(5, "gone"), ValueError("odd"), MemoryError()],
)
@pytest.mark.parametrize("prefetch", ["none", "oracle"])
def test_whatever_a_move_raises_reaches_the_one_who_waits(
    error: BaseException, prefetch: str
) -> None:
    twin = TierTwin({**TIERS, "prefetch": prefetch}).fill()
    shared = prefetcher_of(twin.cache)._shared
    real = shared.move

    def breaks(transfer: Transfer) -> None:
        raise error

    wait_idle(twin.cache)
    shared.move = breaks
    if prefetch == "oracle":
        twin.cache.tiers.slow._stream.drain()
    told = fails_soon(twin)
    shared.move = real
    assert told.__cause__ is error
    assert type(error).__name__ in str(told)
    assert "pages (" in str(told)
    check_totals([twin.cache])
    works(twin)


def test_an_idle_worker_that_is_killed_is_replaced() -> None:
    twin = TierTwin({**TIERS, "prefetch": "none"}).fill()
    old = worker_of(twin)
    kill(old)
    works(twin)
    old.join(WITHIN_S)
    assert not old.is_alive()
    check_totals([twin.cache])
    works(twin)
    assert worker_of(twin) is not old


def test_transfers_that_a_dead_worker_never_began_keep_the_totals_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What never began is neither fetched nor wasted."""
    twin = TierTwin(TIERS).fill()
    twin.cache.tiers.slow._stream.drain()
    old, shared = worker_of(twin), prefetcher_of(twin.cache)._shared
    kill(old)
    with shared.changed:
        shared.changed.notify_all()
    old.join(WITHIN_S)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        fails_soon(twin)
        twin.cache.tiers.slow._stream.drain()
    check_totals([twin.cache])
    works(twin)


def refused(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def twin_groups(twin: TierTwin) -> list[Any]:
    twin.begin([1])
    return list(twin.cache.tiers._plan.groups)


def test_a_worker_killed_within_a_move_tells_and_goes_on() -> None:
    twin = TierTwin({**TIERS, "prefetch": "none"}).fill()
    shared = prefetcher_of(twin.cache)._shared
    real, begun = shared.move, threading.Event()

    def endless(transfer: Transfer) -> None:
        begun.set()
        while True:
            time.sleep(0.001)

    shared.move = endless
    victim = worker_of(twin)

    def killer() -> None:
        begun.wait(WITHIN_S)
        kill(victim)

    helper = threading.Thread(target=killer)
    helper.start()
    told = fails_soon(twin)
    helper.join()
    assert isinstance(told.__cause__, SystemExit)
    shared.move = real
    works(twin)


@pytest.mark.parametrize("prefetch", ["none", "oracle"])
def test_a_worker_killed_just_before_a_move_never_passes_an_unread_buffer_on(
    prefetch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = TierTwin({**TIERS, "prefetch": prefetch}).fill()
    twin.cache.tiers.slow._stream.drain()

    def killed(*args: Any) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(prefetcher_module, "_make", killed)
        fails_soon(twin)
    works(twin)


def test_no_thread_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's limit of threads is reached: an error, no lost buffer, and a cache that closes."""
    twin = TierTwin({**TIERS, "prefetch": "none"}).fill()
    prefetcher = prefetcher_of(twin.cache)
    old = worker_of(twin)
    kill(old)
    with prefetcher._shared.changed:
        prefetcher._shared.changed.notify_all()
    old.join(WITHIN_S)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        fails_soon(twin)
        fails_soon(twin)
    works(twin)
    with monkeypatch.context() as patch:
        old = worker_of(twin)
        kill(old)
        with prefetcher._shared.changed:
            prefetcher._shared.changed.notify_all()
        old.join(WITHIN_S)
        patch.setattr(threading.Thread, "start", refused)
        fails_soon(twin)
        twin.cache.close()


def test_a_cache_closed_in_the_middle_of_a_forward() -> None:
    twin = TierTwin(TIERS).fill()
    twin.begin([1])
    twin.cache.write(0, *twin.random_kv(1, 1))
    twin.cache.close()
    with pytest.raises(Exception, match="closed"):
        attend_once(twin)
    twin.cache.abort()
    with pytest.raises(Exception, match="closed"):
        twin.cache.begin([], 1, None)


def attend_once(twin: TierTwin) -> None:
    twin.cache.attend(0, torch.randn(1, 4, 1, 4), LayerSpec(scaling=1.0))


@pytest.mark.parametrize("call", ["gather", "clone", "truncate", "reorder", "begin"])
def test_a_closed_cache_says_so(call: str, tmp_path: Path) -> None:
    twin = TierTwin({**TIERS, "disk": str(tmp_path)}).fill()
    twin.cache.close()
    twin.cache.close()
    calls: dict[str, Callable[[], object]] = {
        "gather": lambda: twin.cache.gather(0, 0),
        "clone": lambda: twin.cache.clone(),
        "truncate": lambda: twin.cache.truncate([3]),
        "reorder": lambda: twin.cache.reorder([0]),
        "begin": lambda: twin.begin([1]),
    }
    with pytest.raises(Exception, match=r"was closed.*Allowed.*Use a new cache"):
        calls[call]()


def test_a_cache_collected_by_its_own_worker_ends_it(tmp_path: Path) -> None:
    """The collector may run in any thread, also in the one that is reading for the cache."""
    twin = TierTwin({**TIERS, "disk": str(tmp_path)}).fill()
    shared, thread = prefetcher_of(twin.cache)._shared, worker_of(twin)
    path, gone = disk_of(twin.cache).path, threading.Event()
    wait_idle(twin.cache)
    twin.cache.tiers.slow._stream.drain()
    moves, reading, dropped = [shared.move], threading.Event(), threading.Event()

    def collects(transfer: Transfer) -> None:
        reading.set()
        dropped.wait(WITHIN_S)
        gc.collect()
        moves[0](transfer)

    shared.move = collects
    twin.cache.tiers.slow.begin(batches_of(twin))
    assert reading.wait(WITHIN_S)
    weakref.finalize(twin.cache.tiers, gone.set)
    gc.disable()
    try:
        loop: list[Any] = [twin]
        loop.append(loop)
        del twin, loop
        dropped.set()
        assert gone.wait(WITHIN_S), "the cache was not collected"
        thread.join(WITHIN_S)
    finally:
        gc.enable()
    assert not thread.is_alive(), "the worker waits for itself"
    moves.clear()
    gc.collect()
    assert not path.exists()


def batches_of(twin: TierTwin) -> list[Any]:
    groups = twin_groups(twin)
    twin.cache.abort()
    twin.cache.tiers.slow._stream.drain()
    return [group.of_layer(0) for group in groups]
