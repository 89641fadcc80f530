"""One worker thread that makes transfers in the order of their priority. Never hangs the one who waits for it."""

from __future__ import annotations

import heapq
import itertools
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
    changed: threading.Condition = field(default_factory=threading.Condition)
    queue: list[tuple[float, int, Transfer]] = field(default_factory=list)
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
        self._max_queued = max_queued
        self._thread: threading.Thread | None = None
        self._serial = itertools.count()
        self._end: weakref.finalize[..., Prefetcher] | None = None

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

    def submit(self, transfer: Transfer) -> None:
        """Queues a transfer; lower priorities go first."""
        shared = self._shared
        with shared.changed:
            assert not shared.is_closing, "submit after close"
            assert len(shared.queue) < self._max_queued, "more queued than there are buffers"
            heapq.heappush(shared.queue, (transfer.priority, next(self._serial), transfer))
            shared.changed.notify_all()
        if self._thread is None or not self._thread.is_alive():
            self._start()

    def cancel(self, transfer: Transfer) -> bool:
        """Takes a transfer back; returns whether it had not begun. One that runs is left to its end."""
        shared = self._shared
        with shared.changed:
            if transfer.state is not State.QUEUED:
                return transfer.state is State.CANCELLED
            transfer.state = State.CANCELLED
            shared.queue = [entry for entry in shared.queue if entry[2] is not transfer]
            heapq.heapify(shared.queue)
            return True

    def wait(self, transfer: Transfer) -> None:
        """Waits until a transfer is done.

        Raises:
            TierError: the transfer failed, or the worker died; the cause is attached.
        """
        self.settle(transfer)
        error = transfer.error
        if transfer.state is State.CANCELLED:
            raise TierError(
                "this OVAL cache was closed while a forward read its pages. Allowed: to close it between forwards. "
                "Generate again with a new cache."
            )
        if isinstance(error, TierError):
            raise error
        if error is not None:
            raise TierError(
                f"pages {transfer.batch.page_ids} could not be brought to fast memory: "
                f"{type(error).__name__}: {error}. Generate again; if it happens again, report it."
            ) from error

    def settle(self, transfer: Transfer) -> None:
        """Waits until nobody writes to a transfer's buffer any more; its error stays with it."""
        shared = self._shared
        with shared.changed:
            while transfer.state in (State.QUEUED, State.RUNNING):
                if self._thread is None or not self._thread.is_alive():
                    transfer.error = transfer.error or RuntimeError("the prefetch worker died")
                    transfer.state = State.DONE
                    shared.queue = [entry for entry in shared.queue if entry[2] is not transfer]
                    heapq.heapify(shared.queue)
                    return
                shared.changed.wait(_LOOK_S)

    def close(self) -> None:
        """Ends the worker after the transfer that runs; what is queued is cancelled. Twice is harmless."""
        if self._end is not None:
            self._end()
        _stop(self._shared, None)

    def _start(self) -> None:
        if self._end is not None:
            self._end.detach()
        thread = threading.Thread(
            target=_work, args=(self._shared,), name="oval-prefetch", daemon=True
        )
        self._thread = thread
        self._end = weakref.finalize(self, _stop, self._shared, thread)
        thread.start()


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
        if running is not None:  # something killed the thread itself
            _done(shared, running, 0.0)


def _make(shared: _Shared, transfer: Transfer) -> None:
    begin = time.perf_counter()
    try:
        shared.move(transfer)
    except BaseException as error:  # noqa: BLE001 - handed to the one who waits
        transfer.error = error
    _done(shared, transfer, time.perf_counter() - begin)


def _done(shared: _Shared, transfer: Transfer, seconds: float) -> None:
    with shared.changed:
        transfer.done_at = time.perf_counter()
        transfer.state = State.DONE
        shared.transfers += 1
        shared.transfer_s += seconds
        shared.changed.notify_all()


def _stop(shared: _Shared, thread: threading.Thread | None) -> None:
    with shared.changed:
        shared.is_closing = True
        for _, _, transfer in shared.queue:
            transfer.state = State.CANCELLED
        shared.queue = []
        shared.changed.notify_all()
    if thread is not None and thread is not threading.current_thread():
        thread.join()
