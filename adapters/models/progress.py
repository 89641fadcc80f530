"""What a long build tells its user. Knows nothing of models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

if TYPE_CHECKING:
    from types import TracebackType


class BuildReporter(Protocol):
    """Receives the steps of a build as they happen."""

    def step(self, text: str, total: int | None = None, unit: str = "") -> None:
        """A new step begins; `total` is None where its length is unknown."""

    def update(self, done: int) -> None:
        """`done` of the current step's total are through."""

    def note(self, text: str) -> None:
        """Something the user should know, that is not an error."""


class SilentReporter:
    """Says nothing."""

    def step(self, text: str, total: int | None = None, unit: str = "") -> None:
        """Ignores a new step."""

    def update(self, done: int) -> None:
        """Ignores progress."""

    def note(self, text: str) -> None:
        """Ignores a note."""


class RichReporter:
    """Shows one line a step on stderr. Use it as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=console or Console(stderr=True),
        )
        self._task: TaskID | None = None
        self._total: int | None = None
        self._unit = ""

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._finish_step()
        elif self._task is not None:
            self._progress.stop_task(self._task)
        self._progress.stop()

    def step(self, text: str, total: int | None = None, unit: str = "") -> None:
        """Ends the line of the last step and starts a new one."""
        self._finish_step()
        self._total, self._unit = total, unit
        self._task = self._progress.add_task(text, total=total, amount="")

    def update(self, done: int) -> None:
        """Moves the bar of the current step."""
        if self._task is not None:
            self._progress.update(self._task, completed=done, amount=self._amount(done))

    def note(self, text: str) -> None:
        """Prints a line above the bars."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _finish_step(self) -> None:
        if self._task is not None:
            total = self._total or 1
            self._progress.update(self._task, total=total, completed=total)
            self._progress.stop_task(self._task)

    def _amount(self, done: int) -> str:
        scale, digits = (1e6, 1) if self._unit == "MB" else (1, 0)
        of = "" if self._total is None else f" / {self._total / scale:.{digits}f}"
        return f"{done / scale:.{digits}f}{of} {self._unit}"
