"""Two ways to answer the same questions: what they disagree on, and whether that is chance (McNemar's exact test)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Paired", "paired"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Paired:
    """Questions by who was right.

    Attributes:
        both: both were.
        only_first: only the first.
        only_second: only the second.
        neither: none.
    """

    both: int
    only_first: int
    only_second: int
    neither: int

    @property
    def questions(self) -> int:
        """All of them."""
        return self.both + self.only_first + self.only_second + self.neither

    @property
    def p_value(self) -> float:
        """How likely it is that so unequal a split of the disagreements, or one more so, comes by chance (exact, two-sided)."""
        discordant = self.only_first + self.only_second
        fewer = min(self.only_first, self.only_second)
        ways = sum(math.comb(discordant, k) for k in range(fewer + 1))
        return min(1.0, 2 * ways / 2**discordant)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, ready for JSON; accuracies are None where there is no question."""
        n = self.questions
        return {
            "questions": n,
            **asdict(self),
            "first": (self.both + self.only_first) / n if n else None,
            "second": (self.both + self.only_second) / n if n else None,
            "p_value": self.p_value,
        }


def paired(pairs: Iterable[tuple[bool, bool]]) -> Paired:
    """Counts (first was right, second was right)."""
    counts = {(a, b): 0 for a in (True, False) for b in (True, False)}
    for first, second in pairs:
        counts[bool(first), bool(second)] += 1
    return Paired(
        both=counts[True, True],
        only_first=counts[True, False],
        only_second=counts[False, True],
        neither=counts[False, False],
    )
