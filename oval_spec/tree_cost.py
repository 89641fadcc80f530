"""How many nodes a tree should have here: what they bring against what a forward of so many tokens costs."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence

REMEMBERED = 0.97
"""Weight of the steps before in what time brings: some 30 steps count."""
PRIOR_TOKENS = 3.0
"""Tokens that a drafter is believed to have promised and kept besides those of the last steps. They never fade, so that a
drafter that is asked for nothing, as it was wrong for a while, is believed again some time later."""
WINDOW = 16
"""Forwards of a size that are remembered: enough that a hiccup does not count, few enough to follow a growing text."""


class ForwardCost:
    """Seconds that forwards took lately, by how many tokens they brought.

    Sizes that differ in less than an eighth share a bucket, those up to 8 have one each. Of a bucket the lower quartile
    counts, since what disturbs a forward only makes it longer; and a larger forward is held to take no less than a smaller
    one, so that one unlucky measurement cannot rule a size out.
    """

    def __init__(self) -> None:
        self._measured: dict[int, deque[tuple[int, float]]] = {}
        self._points: list[tuple[float, float]] | None = (
            None  # medians by size, until the next forward
        )

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Takes note of one forward of `num_tokens` new tokens, those of all rows together."""
        assert num_tokens > 0, "a forward brings a token"
        assert seconds > 0, "a forward takes time"
        bucket = self._measured.setdefault(_bucket(num_tokens), deque(maxlen=WINDOW))
        bucket.append((num_tokens, seconds))
        self._points = None

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
        points = self._points
        if points is None:
            points = self._points = self._smooth()
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

    def _smooth(self) -> list[tuple[float, float]]:
        """Returns (size, seconds) by bucket, never falling: neighbours that would fall are averaged (isotonic regression)."""
        points, groups = [], []
        for _, bucket in sorted(self._measured.items()):
            took = sorted(seconds for _, seconds in bucket)
            points.append(statistics.median(size for size, _ in bucket))
            groups.append((took[(len(took) - 1) // 4], len(took), 1))  # seconds, weight, buckets
            while len(groups) > 1 and groups[-1][0] < groups[-2][0]:
                (slow, few, left), (fast, many, right) = groups[-2:]
                mean = (slow * few + fast * many) / (few + many)
                groups[-2:] = [(mean, few + many, left + right)]
        seconds = [own for own, _, count in groups for _ in range(count)]
        return list(zip(points, seconds, strict=True))


def choose_num_nodes(tau: Sequence[float], seconds: Callable[[int], float]) -> int:
    """Returns the number of nodes, the root included, that emits most tokens a second; of equals the smallest.

    Args:
        tau: tokens that a step emits on average with 1, 2, ... nodes, as `tree_search.tau_by_nodes` gives them.
        seconds: what a step of so many nodes takes, drafting included.
    """
    assert tau, "one node at least: the root"
    return max(range(1, len(tau) + 1), key=lambda nodes: tau[nodes - 1] / seconds(nodes))


class WidthChooser:
    """Cuts each step's trees to the number of nodes that pays, by how likely their nodes are.

    A node is worth its time if the tokens that it brings are more than the same time brings elsewhere. What time brings is
    the rate of the steps so far, so that the choices settle where tokens a second are most in the long run (Dinkelbach's
    way to the best ratio). Drafters may be too sure of themselves: what they promised is weighed by what came.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._promised = self._accepted = 0.0

    def choose(
        self, chances: Sequence[Sequence[float]], seconds: Callable[[int], float], drafting: float
    ) -> int:
        """Returns how many nodes each row's tree should keep, the root included.

        Args:
            chances: by row and node, best nodes first: how likely it is that the text goes through it; the root's is 1.
            seconds: what a forward takes that brings so many nodes for each row.
            drafting: seconds that drafting took.
        """
        most = max(map(len, chances))
        trust = (PRIOR_TOKENS + self._accepted) / (PRIOR_TOKENS + self._promised)
        tokens, best = 0.0, (0.0, 0, 0.0, 0.0)
        for nodes in range(1, most + 1):
            added = sum(own[nodes - 1] for own in chances if len(own) >= nodes)
            tokens += added if nodes == 1 else trust * added
            spent = seconds(nodes) + drafting
            worth = (
                tokens - spent * self._tokens / self._seconds if self._seconds else tokens / spent
            )
            if nodes == 1 or worth > best[0]:
                best = (worth, nodes, tokens, spent)
        _, nodes, tokens, spent = best
        self._tokens = self._tokens * REMEMBERED + tokens
        self._seconds = self._seconds * REMEMBERED + spent
        return nodes

    def took(self, promised: float, accepted: int) -> None:
        """Takes note of a step: what its drafted nodes promised, the sum of their chances, and how many were accepted."""
        self._promised = self._promised * REMEMBERED + promised
        self._accepted = self._accepted * REMEMBERED + accepted


def _bucket(num_tokens: int) -> int:
    # The highest three bits after the first: 8 sizes in each doubling.
    shift = max(0, num_tokens.bit_length() - 4)
    return num_tokens >> shift << shift
