"""Decides from measured speed whether speculation pays here, turns it off where it does not, and says why.

Speed is tokens a second over whole steps, drafting and verification included, so that nothing is left out. What plain
decoding would do is measured too: a few steps now and then are plain ones. Where speculation was slower over a whole
window, plain decoding goes on for a while; then a window is tried again, since a text may turn to what drafts well. Each
try that fails doubles the wait, so that tries cost next to nothing in the end.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

WINDOW = 32
"""Speculative steps that are judged together: fewer would let the luck of a few drafts decide."""
FIRST_PROBE = 8
"""Speculative steps before plain ones are measured first."""
PROBE_STEPS = 3
"""Plain steps of the first probe: their median does not heed one hiccup."""
PROBE_EVERY = 48
"""Speculative steps between later single plain ones: 2 % of the steps, which are not lost but merely plain."""
MARGIN = 0.03
"""Share by which speculation must be slower: below it the two are not told apart."""
FIRST_REST = 256
"""Plain steps until speculation is tried again; doubles with each try that fails."""
LONGEST_REST = 4096
_LEAST_SECONDS = 1e-9
"""What a step takes at least, for a clock that is too coarse to see it."""


class SpeculationSwitch:
    """Says before each step whether to speculate.

    Call `begin_step` before drafting and `end_step` after the step's tokens are known.

    Args:
        turns_off: False: always speculates.
        clock: seconds that go forward.
    """

    def __init__(self, turns_off: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._turns_off = turns_off
        self._clock = clock
        self._rows = 0
        self._plain: deque[float] = deque(maxlen=2 * PROBE_STEPS)  # seconds
        self._window: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # tokens, seconds
        self._since_plain = 0
        self._probes_left = 0
        self._resting = 0
        self._rest = FIRST_REST
        self._speculates = True
        self._began = 0.0

    @property
    def is_off(self) -> bool:
        """Whether plain decoding goes on for a while."""
        return self._resting > 0

    def begin_step(self) -> bool:
        """Returns whether the step that begins now should draft."""
        self._speculates = not self._turns_off or not (self._resting or self._probes_left)
        self._began = self._clock()
        return self._speculates

    def end_step(self, num_tokens: int, num_rows: int) -> str | None:
        """Takes note of the step; returns what to tell the user, if it switched.

        Args:
            num_tokens: tokens that were emitted, of all rows together.
            num_rows: rows that took part. Steps of other numbers of rows are not comparable: they are forgotten.
        """
        seconds = max(self._clock() - self._began, _LEAST_SECONDS)
        assert num_tokens >= num_rows > 0, "a step emits a token a row"
        if not self._turns_off:
            return None
        if num_rows != self._rows:
            self._rows = num_rows
            self._plain.clear()
            self._window.clear()
            # Where rows end one after another, each number of them is too short-lived to be measured.
            self._since_plain = self._probes_left = 0
        if not self._speculates:
            return self._after_plain(seconds)
        self._window.append((num_tokens, seconds))
        self._since_plain += 1
        if not self._plain:
            self._probes_left = PROBE_STEPS if self._since_plain >= FIRST_PROBE else 0
        elif self._since_plain >= PROBE_EVERY:
            self._probes_left = 1
        return self._judge()

    def _after_plain(self, seconds: float) -> str | None:
        self._plain.append(seconds)
        self._since_plain = 0
        if not self._resting:
            self._probes_left = max(0, self._probes_left - 1)
            return None
        self._resting -= 1
        if self._resting:
            return None
        self._window.clear()
        return f"speculation is tried again over the next {WINDOW} steps"

    def _judge(self) -> str | None:
        if len(self._window) < WINDOW or not self._plain:
            return None
        # Luck with drafts is part of the speed, a hiccup of the machine is not: mean tokens, median seconds.
        tokens = statistics.fmean(count for count, _ in self._window)
        speed = tokens / statistics.median(seconds for _, seconds in self._window)
        plain = self._rows / statistics.median(self._plain)
        if speed >= plain * (1 - MARGIN):
            self._rest = FIRST_REST
            return None
        self._resting = self._rest
        self._rest = min(2 * self._rest, LONGEST_REST)
        self._probes_left = 0
        return (
            f"speculation is off for {self._resting} steps: {speed:.1f} tokens/s over the last {WINDOW} steps against "
            f"{plain:.1f} of plain decoding"
        )
