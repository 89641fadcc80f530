"""What one forward moved: the difference of the totals, and hits and misses by layer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from oval_core.metrics import StepMetrics, TierCounters


class StepMeter:
    """Measures forwards of one storage by its totals."""

    def __init__(self, counters: TierCounters) -> None:
        self._totals = counters
        self._before = replace(counters)
        self._hits: Counter[int] = Counter()
        self._misses: Counter[int] = Counter()

    def begin(self) -> None:
        """Starts a forward."""
        self._before = replace(self._totals)
        self._hits, self._misses = Counter(), Counter()

    def asked(self, layer_idx: int, hit: bool, num_pages: int) -> None:
        """Notes pages that a layer asked for: whether they were there."""
        (self._hits if hit else self._misses)[layer_idx] += num_pages

    def end(self) -> StepMetrics:
        """Returns what the forward did."""
        now, before = self._totals, self._before
        leads = now.leads - before.leads
        return StepMetrics(
            bytes_prefetched=now.bytes_prefetched - before.bytes_prefetched,
            bytes_used=now.bytes_used - before.bytes_used,
            bytes_wasted=now.bytes_wasted - before.bytes_wasted,
            bytes_late=now.bytes_late - before.bytes_late,
            bytes_demanded=now.bytes_demanded - before.bytes_demanded,
            stall_s=now.stall_s - before.stall_s,
            lead_s=(now.lead_s - before.lead_s) / leads if leads else 0.0,
            hits=dict(self._hits),
            misses=dict(self._misses),
        )
