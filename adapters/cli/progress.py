"""What long commands show while they run: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

LINE_EVERY_S = 30.0
"""Where a bar cannot be drawn (a log file, a CI run), a line at most so often."""


@contextlib.contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Callable[[str, int], None]]:
    """Gives what moves the bar on by some of `total`, with a word on what runs."""
    done = 0
    with step_bar(console) as step:

        def advance(label: str, amount: int) -> None:
            nonlocal done
            done += amount
            step(label, done, total)

        yield advance


@contextlib.contextmanager
def step_bar(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Gives what says what runs, how many of it are done, and of how many."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())  # fmt: skip
    # no refresh thread: it would run while a step is timed
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bars:
        task: Any = bars.add_task("", total=None)
        last = 0

        def show(label: str, done: int, total: int) -> None:
            nonlocal task, last
            if done < last:  # another count begins: its time is its own
                bars.remove_task(task)
                task = bars.add_task(label, total=total)
            last = done
            bars.update(task, completed=done, total=total, description=label, refresh=True)

        yield show


class _Lines:
    """Prints how far things are, seldom."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = self._start = time.monotonic()
        self._first = self._last = 0

    def __call__(self, label: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done < self._last:
            self._first, self._start = done, now
        self._last = done
        if now - self._shown < LINE_EVERY_S:
            return
        self._shown = now
        left = ""
        if done > self._first and total > done:
            seconds = (now - self._start) / (done - self._first) * (total - done)
            left = f", about {seconds / 60:.0f} min left" if seconds >= 90 else f", about {seconds:.0f} s left"  # fmt: skip
        self._console.print(
            f"{label}: {done} of {total}{left}", markup=False, highlight=False, soft_wrap=True
        )
