"""One worker thread that makes transfers in the order of their priority. Never hangs the one who waits for it."""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from oval_core.errors import TierError
from oval_core.tiers.transfer import State, Transfer

_LOOK_S = 0.2
"""Seconds after which one who waits looks whether the worker is still alive."""


@dataclass(slots=True)
class _Shared:
    """What the worker and its owner share; the worker keeps nothing else alive."""

    move: Callable[[Transfer], None]
    owner: int = field(default_factory=os.getpid)
    changed: threading.Condition = field(default_factory=threading.Condition)
    queue: list[tuple[float, int, Transfer]] = field(default_factory=list)
    thread: threading.Thread | None = None
    """The worker; None before the first and after one that ended."""
    is_closing: bool = False
    bytes_ahead: int = 0
    transfers: int = 0
    transfer_s: float = 0.0


class Prefetcher:
    """Makes transfers on a worker thread, started when first needed and again if it died."""

    def __init__(self, move: Callable[[Transfer], None], max_queued: int) -> None:
        """Makes a prefetcher without a thread.

        Args:
            move: makes one transfer; whatever it raises reaches the one who waits.
            max_queued: most transfers that may wait for their turn.
        """
        self._shared = _Shared(move)
        self._end = weakref.finalize(self, _stop, self._shared)
        self._max_queued = max_queued
        self._serial = itertools.count()

    @property
    def bytes_ahead(self) -> int:
        """Bytes of the transfers made ahead that ever began."""
        return self._shared.bytes_ahead

    @property
    def transfers(self) -> int:
        """Transfers that were made."""
        return self._shared.transfers

    @property
    def transfer_s(self) -> float:
        """Seconds spent on them."""
        return self._shared.transfer_s

    @property
    def is_worker(self) -> bool:
        """Whether the caller is the worker itself: it may not wait for its own work."""
        return self._shared.thread is threading.current_thread()

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is a forked child: the worker is in the parent, and so may be the one who holds the lock."""
        return self._shared.owner != os.getpid()

    def submit(self, transfer: Transfer) -> None:
        """Queues a transfer; lower priorities go first.

        Raises:
            TierError: the system has no thread for the worker; nothing was queued.
        """
        if self.is_elsewhere:  # a forked child: it gets a worker of its own
            self._end.detach()
            self._shared = _Shared(self._shared.move)
            self._end = weakref.finalize(self, _stop, self._shared)
        shared = self._shared
        with shared.changed:
            assert not shared.is_closing, "submit after close"
            assert len(shared.queue) < self._max_queued, "more queued than there are buffers"
            self._see_to_worker()
            transfer.home = shared
            heapq.heappush(shared.queue, (transfer.priority, next(self._serial), transfer))
            shared.changed.notify_all()

    def cancel(self, transfer: Transfer) -> bool:
        """Takes a transfer back; returns whether it had not begun. One that runs is left to its end."""
        shared = self._shared
        if self._is_lost(transfer):
            return True
        with shared.changed:
            if transfer.state is State.QUEUED:
                transfer.state = State.CANCELLED
                shared.queue = [entry for entry in shared.queue if entry[2] is not transfer]
                heapq.heapify(shared.queue)
            return transfer.state is State.CANCELLED

    def wait(self, transfer: Transfer) -> None:
        """Waits until a transfer is done.

        Raises:
            TierError: the transfer failed, or the worker died; the cause is attached.
        """
        self.settle(transfer)
        error = transfer.error
        if isinstance(error, TierError):
            raise error
        if error is not None:
            raise TierError(
                f"pages {transfer.batch.page_ids} could not be brought to fast memory: "
                f"{type(error).__name__}: {error}. Generate again; if it happens again, report it."
            ) from error
        if transfer.state is State.CANCELLED:
            raise TierError(
                "this OVAL cache was closed, or its process forked, while a forward read its pages. Allowed: to do so "
                "between forwards. Generate again with a new cache."
            )

    def settle(self, transfer: Transfer) -> None:
        """Waits until nobody writes to a transfer's buffer any more; its error stays with it."""
        shared = self._shared
        if self._is_lost(transfer) or self.is_worker:
            return
        with shared.changed:
            while transfer.state in (State.QUEUED, State.RUNNING):
                if not _is_alive(shared):
                    if transfer.state is State.RUNNING:
                        _fail(shared, transfer)
                        return
                    self._see_to_worker()  # it died between two transfers: nothing is lost
                shared.changed.wait(_LOOK_S)

    def close(self) -> None:
        """Ends the worker after the transfer that runs; what is queued is cancelled. Twice is harmless."""
        self._end()

    def _is_lost(self, transfer: Transfer) -> bool:
        """Whether a transfer was left behind in a parent process; it is cancelled then."""
        if not self.is_elsewhere and transfer.home in (None, self._shared):
            return False
        transfer.state = State.CANCELLED
        return True

    def _see_to_worker(self) -> None:
        """Starts a worker if none lives; the lock is held."""
        shared = self._shared
        if _is_alive(shared):
            return
        thread = threading.Thread(target=_work, args=(shared,), name="oval-prefetch", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise TierError(
                f"no thread could be started to bring pages to fast memory: {error}. Nothing is lost. Allow this "
                "process more threads, and generate again."
            ) from error
        shared.thread = thread


def _is_alive(shared: _Shared) -> bool:
    return shared.thread is not None and shared.thread.is_alive()


def _work(shared: _Shared) -> None:
    running: Transfer | None = None
    try:
        while True:
            with shared.changed:
                while not shared.queue:
                    if shared.is_closing:
                        return
                    shared.changed.wait()
                running = heapq.heappop(shared.queue)[2]
                running.state = State.RUNNING
                if running.ahead:
                    shared.bytes_ahead += running.num_bytes
            _make(shared, running)
            running = None
    finally:
        with shared.changed:
            if shared.thread is threading.current_thread():
                shared.thread = None
            if running is not None and running.state is State.RUNNING:  # the thread was killed
                _fail(shared, running)
            shared.changed.notify_all()


def _make(shared: _Shared, transfer: Transfer) -> None:
    begin = time.perf_counter()
    try:
        shared.move(transfer)
    except BaseException as error:  # noqa: BLE001 - handed to the one who waits
        transfer.error = error
    with shared.changed:
        _done(shared, transfer, time.perf_counter() - begin)


def _fail(shared: _Shared, transfer: Transfer) -> None:
    transfer.error = transfer.error or RuntimeError("the prefetch worker died")
    _done(shared, transfer, 0.0)


def _done(shared: _Shared, transfer: Transfer, seconds: float) -> None:
    transfer.done_at = time.perf_counter()
    transfer.state = State.DONE
    shared.transfers += 1
    shared.transfer_s += seconds
    shared.changed.notify_all()


def _stop(shared: _Shared) -> None:
    if shared.owner != os.getpid():
        return
    with shared.changed:
        shared.is_closing = True
        for _, _, transfer in shared.queue:
            transfer.state = State.CANCELLED
        shared.queue = []
        thread = shared.thread
        shared.changed.notify_all()
    if thread is not None and thread is not threading.current_thread():
        thread.join()
