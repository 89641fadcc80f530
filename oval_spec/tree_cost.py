"""How many nodes a tree should have here: what they bring against what a forward of so many tokens costs."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence

WINDOW = 16
"""Forwards of a size that are remembered: enough that a hiccup does not count, few enough to follow a growing text."""


class ForwardCost:
    """Running medians of the seconds that forwards took, by how many tokens they brought.

    Sizes that differ in less than an eighth share a bucket, those up to 8 have one each.
    """

    def __init__(self) -> None:
        self._measured: dict[int, deque[tuple[int, float]]] = {}

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Takes note of one forward of `num_tokens` new tokens, those of all rows together."""
        assert num_tokens > 0, "a forward brings a token"
        assert seconds > 0, "a forward takes time"
        bucket = self._measured.setdefault(_bucket(num_tokens), deque(maxlen=WINDOW))
        bucket.append((num_tokens, seconds))

    @property
    def is_known(self) -> bool:
        """Whether a forward was measured yet."""
        return bool(self._measured)

    @property
    def largest(self) -> float:
        """The largest size that was measured, in tokens; 0 before the first."""
        if not self._measured:
            return 0
        return statistics.median(size for size, _ in self._measured[max(self._measured)])

    def seconds(self, num_tokens: int) -> float:
        """Returns what a forward of `num_tokens` takes: between measured sizes by a straight line.

        Below the smallest it is the smallest's; above the largest the last line goes on, but not steeper than in
        proportion, and one measured size alone counts in proportion: what was not measured is not promised cheap.
        """
        assert self._measured, "no forward was measured"
        points = [
            (
                statistics.median(size for size, _ in bucket),
                statistics.median(seconds for _, seconds in bucket),
            )
            for _, bucket in sorted(self._measured.items())
        ]
        if num_tokens <= points[0][0]:
            return points[0][1]
        for (low, fast), (high, slow) in zip(points, points[1:], strict=False):
            if num_tokens <= high:
                return fast + (slow - fast) * (num_tokens - low) / (high - low)
        size, last = points[-1]
        steepest = last / size
        slope = steepest
        if len(points) > 1:
            slope = (last - points[-2][1]) / (size - points[-2][0])
        return last + min(max(slope, 0.0), steepest) * (num_tokens - size)


def choose_num_nodes(tau: Sequence[float], seconds: Callable[[int], float]) -> int:
    """Returns the number of nodes, the root included, that emits most tokens a second; of equals the smallest.

    Args:
        tau: tokens that a step emits on average with 1, 2, ... nodes, as `tree_search.tau_by_nodes` gives them.
        seconds: what a step of so many nodes takes, drafting included.
    """
    assert tau, "one node at least: the root"
    return max(range(1, len(tau) + 1), key=lambda nodes: tau[nodes - 1] / seconds(nodes))


def _bucket(num_tokens: int) -> int:
    # The highest three bits after the first: 8 sizes in each doubling.
    shift = max(0, num_tokens.bit_length() - 4)
    return num_tokens >> shift << shift
