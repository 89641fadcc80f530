"""Speculation turns itself off where it is slower, says so, and tries again; with a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable

from oval_spec.turn_off import (
    FIRST_PROBE,
    FIRST_REST,
    LONGEST_REST,
    MARGIN,
    WINDOW,
    SpeculationSwitch,
)


class Run:
    """Steps of a generation: how long they take and how many tokens they bring is the test's choice."""

    def __init__(self, turns_off: bool = True) -> None:
        self.now = 0.0
        self.switch = SpeculationSwitch(turns_off, lambda: self.now)
        self.kinds: list[bool] = []
        self.messages: list[tuple[int, str]] = []

    def steps(
        self,
        count: int,
        seconds: Callable[[int], float],
        tokens: int,
        rows: int = 1,
        plain_seconds: float = 1.0,
    ) -> None:
        """Takes `count` steps; a speculative step takes `seconds(i)` and brings `tokens` a row."""
        for _ in range(count):
            i = len(self.kinds)
            speculates = self.switch.begin_step()
            self.now += seconds(i) if speculates else plain_seconds
            message = self.switch.end_step(rows * (tokens if speculates else 1), rows)
            self.kinds.append(speculates)
            if message:
                self.messages.append((i, message))


def test_speculation_that_pays_stays_on() -> None:
    run = Run()
    run.steps(1000, lambda i: 1.5, tokens=2)
    assert run.messages == []
    assert not run.switch.is_off
    plain = run.kinds.count(False)
    assert 10 < plain < 30, "about two steps in a hundred measure plain decoding"
    assert all(run.kinds[:FIRST_PROBE])


def test_speculation_that_is_slower_ends_after_a_window_and_says_why() -> None:
    run = Run()
    run.steps(WINDOW + 3, lambda i: 4.0, tokens=2)
    ((step, message),) = run.messages
    assert step == WINDOW + 2, "a window of speculative steps and three plain ones"
    assert run.switch.is_off
    assert "0.5 tokens/s" in message
    assert "1.0 of plain" in message
    run.steps(FIRST_REST, lambda i: 4.0, tokens=2)
    assert not any(run.kinds[-FIRST_REST:])
    assert not run.switch.is_off
    assert "tried again" in run.messages[-1][1]


def test_each_try_that_fails_doubles_the_wait() -> None:
    run = Run()
    run.steps(30_000, lambda i: 4.0, tokens=2)
    offs = [step for step, message in run.messages if "is off" in message]
    agains = [step for step, message in run.messages if "tried again" in message]
    waits = [again - off for off, again in zip(offs, agains, strict=False)]
    assert waits[:5] == [FIRST_REST * 2**i for i in range(5)]
    assert set(waits[5:]) == {LONGEST_REST}
    assert run.kinds.count(True) / len(run.kinds) < 0.02


def test_a_text_that_turns_to_what_drafts_well_is_speculated_again() -> None:
    run = Run()
    run.steps(WINDOW + 3, lambda i: 4.0, tokens=2)
    run.steps(2 * FIRST_REST, lambda i: 1.2, tokens=3)
    assert not run.switch.is_off
    assert all(run.kinds[-40:]) or run.kinds[-40:].count(False) == 1
    run.steps(100, lambda i: 9.0, tokens=2)
    assert f"off for {FIRST_REST} steps" in run.messages[-1][1], "success made the wait short again"


def test_hiccups_and_a_near_tie_do_not_count() -> None:
    run = Run()
    run.steps(600, lambda i: 80.0 if i % 9 == 0 else 1.2, tokens=2)
    assert run.messages == []
    tie = Run()
    tie.steps(600, lambda i: 2 / (1 - MARGIN / 2), tokens=2)
    assert tie.messages == []


def test_rows_that_end_do_not_make_it_look_slow() -> None:
    # Eight rows bring eight times the tokens of one; each alone is still 1.5 times as fast as plain.
    run = Run()
    run.steps(200, lambda i: 2.0, tokens=3, rows=8)
    run.steps(200, lambda i: 2.0, tokens=3, rows=1)
    assert run.messages == []


def test_after_rows_ended_everything_is_measured_anew() -> None:
    # For eight rows it pays; one row alone decodes plainly in a small part of the time.
    run = Run()
    run.steps(100, lambda i: 8.0, tokens=3, rows=8, plain_seconds=4.0)
    run.steps(WINDOW + 3, lambda i: 2.0, tokens=3, rows=1, plain_seconds=0.5)
    ((step, message),) = run.messages
    assert step == 100 + WINDOW + 2, "eight steps, three plain ones, the rest of a window"
    assert "1.5 tokens/s" in message
    assert "2.0 of plain" in message


def test_it_can_be_told_to_stay_on() -> None:
    run = Run(turns_off=False)
    run.steps(300, lambda i: 9.0, tokens=1)
    assert all(run.kinds)
    assert run.messages == []


def test_a_clock_that_sees_no_time_pass_decides_nothing() -> None:
    run = Run()
    run.steps(200, lambda i: 0.0, tokens=2, plain_seconds=0.0)
    assert run.messages == []
    late = Run()
    late.steps(100, lambda i: 0.0, tokens=2, plain_seconds=1.0)
    assert late.messages == []


def test_rows_that_end_one_after_another_are_not_measured() -> None:
    run = Run()
    for rows in range(40, 0, -1):
        run.steps(FIRST_PROBE - 2, lambda i: 1.5, tokens=2, rows=rows)
    assert all(run.kinds), "each number of rows would need plain steps of its own"
    run.steps(200, lambda i: 1.5, tokens=2)
    assert 3 <= run.kinds.count(False) <= 10


def test_rows_may_end_while_plain_steps_are_measured() -> None:
    run = Run()
    run.steps(FIRST_PROBE + 1, lambda i: 1.5, tokens=2, rows=3)
    assert run.kinds[-1:] == [False]
    run.steps(1, lambda i: 1.5, tokens=2, rows=2)
    run.steps(40, lambda i: 1.5, tokens=2, rows=1)
    assert run.kinds[-40:].count(False) == 3
    assert run.kinds[-1], "speculation goes on"
