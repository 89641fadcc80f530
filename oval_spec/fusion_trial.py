"""Finds out while decoding which order of page fusion costs least here, and goes back to asking now and then.

What foretelling saves is waiting; what it costs is its own arithmetic. Which is more hangs on the link, the processor and the
text, so it is measured: orders take turns for a few verifications, then the cheapest stays for a while. No order changes what
is read, so no choice changes a token.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence

__all__ = ["AUTO_ORDERS", "FusionTrial"]

AUTO_ORDERS = ("none", "intersection")
"""What `auto` tries where a part of the text is read; tiers look ahead by the target's choice under both."""

SPAN = 4
"""Verifications in a row under one order; the first is not counted, since the order before it moved the pages it finds."""
TURNS = 2
"""Spans an order has in one trial."""
REST = 256
"""Verifications under the cheapest order until all are tried again: a text grows, and turns."""


class FusionTrial:
    """Says which order the next verification is prepared by.

    Args:
        orders: to choose from, the one that wins a draw first.

    Attributes:
        order: of the next verification.
        settled: the order that was cheapest in the last trial; None before the first is over.
    """

    def __init__(self, orders: Sequence[str]) -> None:
        assert orders, "an order to choose"
        self._orders = tuple(orders)
        self.settled: str | None = None
        self._plan = self._trial()
        self._seconds: dict[str, list[float]] = {}
        self.order, self._counts = next(self._plan)

    def end_step(self, seconds: float) -> None:
        """Takes note of a verification.

        Args:
            seconds: that it took to foretell pages, and to wait for pages.
        """
        if self._counts:
            self._seconds.setdefault(self.order, []).append(seconds)
        self.order, self._counts = next(self._plan)

    def _trial(self) -> Iterator[tuple[str, bool]]:
        """Yields the order of each verification, and whether its seconds count."""
        while True:
            self._seconds = {}
            for order in itertools.chain(*itertools.repeat(self._orders, TURNS)):
                for place in range(SPAN):
                    yield order, place > 0
            middle = {order: statistics.median(self._seconds[order]) for order in self._orders}
            self.settled = min(self._orders, key=middle.__getitem__)
            for _ in range(REST):
                yield self.settled, False
