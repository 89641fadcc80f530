"""Lets a loop end between two updates on Ctrl-C, so that what it saves is whole."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["asked_to_stop"]


@contextlib.contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Gives what tells whether Ctrl-C came inside the block; a second one counts at once.

    Python hands signals to the main thread, so elsewhere the answer stays no, and as well where a handler is not
    Python's.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: False
        return
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            handler(number, frame)
        came = True

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, handler)
