"""What a long command shows where no bar can be drawn."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from oval_adapters.cli import progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def _console() -> Console:
    return Console(file=io.StringIO(), width=200)


def test_a_log_gets_a_line_at_most_every_half_minute(clock: list[float]) -> None:
    console = _console()
    with progress.progress_bar(console, 100) as advance:
        for second in range(1, 71):
            clock[0] = float(second)
            advance("reading", 1)
    lines = console.file.getvalue().splitlines()
    assert lines == [
        "reading: 30 of 100, about 70 s left",
        "reading: 60 of 100, about 40 s left",
    ]


def test_a_count_that_begins_anew_has_its_own_time(clock: list[float]) -> None:
    console = _console()
    with progress.step_bar(console) as step:
        clock[0] = 100.0
        step("recording", 50, 50)
        clock[0] = 110.0
        step("updates", 0, 1000)
        clock[0] = 140.0
        step("updates", 10, 1000)
    lines = console.file.getvalue().splitlines()
    assert lines == ["recording: 50 of 50", "updates: 10 of 1000, about 50 min left"]


def test_a_terminal_gets_a_bar() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with progress.step_bar(console) as step:
        step("recording", 1, 2)
        step("updates", 0, 9)
        step("updates", 9, 9)
    assert "updates" in console.file.getvalue()
