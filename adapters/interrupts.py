"""Holds Ctrl-C back while a few lines run that must not be cut in half."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["hold_interrupts"]


@contextlib.contextmanager
def hold_interrupts() -> Iterator[None]:
    """Runs the block whole; a Ctrl-C that comes meanwhile counts when it ends.

    Python hands signals to the main thread, so elsewhere there is nothing to hold. A handler that is not Python's is
    left alone.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[-1])
