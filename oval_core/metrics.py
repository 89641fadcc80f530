"""Counts what caches did. Holds numbers only; asks nobody."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field


@dataclass(slots=True)
class CacheCounters:
    """Totals of one cache, or of several added up.

    Attributes:
        forwards: forwards committed.
        tokens_written: tokens committed over all rows.
        tokens_dropped: committed tokens dropped again (rejected drafts, cropped turns).
        slots_copied: slots whose K/V were copied, by forks and by growth of the pool.
        pool_growths: times the pool was laid out anew, the first time included.
        peak_slots: most slots in use at the end of a forward.
        peak_bytes: most bytes set aside at the end of a forward.
        image_pages: pages that tokens of images were put into.
        tiers: what moved between tiers.
        routing: what the policies `routed` and `guarded` read.
    """

    forwards: int = 0
    tokens_written: int = 0
    tokens_dropped: int = 0
    slots_copied: int = 0
    pool_growths: int = 0
    peak_slots: int = 0
    peak_bytes: int = 0
    image_pages: int = 0
    tiers: TierCounters = field(default_factory=lambda: TierCounters())
    routing: RoutingCounters = field(default_factory=lambda: RoutingCounters())

    def count_forward(self, num_tokens: int, num_slots: int, num_bytes: int) -> None:
        """Counts one committed forward."""
        self.forwards += 1
        self.tokens_written += num_tokens
        self.peak_slots = max(self.peak_slots, num_slots)
        self.peak_bytes = max(self.peak_bytes, num_bytes)

    def to_dict(self) -> dict[str, int]:
        """Returns the totals by name, without those of tiers, routing and images."""
        parts = ("tiers", "routing", "image_pages")
        return {name: value for name, value in asdict(self).items() if name not in parts}


@dataclass(slots=True)
class TierCounters:
    """What moved between tiers: totals of one cache, or of several added up.

    At all times `bytes_prefetched == bytes_used + bytes_wasted +` what waits in fast memory to be read; nothing waits
    once a cache is reset or closed.

    Attributes:
        bytes_prefetched: bytes whose transfer began before a layer asked for them.
        bytes_used: of those, bytes that a layer then read.
        bytes_wasted: of those, bytes that nobody read: cancelled, cut, or thrown out for something else.
        bytes_demanded: bytes that were fetched only when a layer asked for them.
        bytes_late: bytes that a layer had to wait for, prefetched or demanded.
        bytes_evicted: bytes of pages that left fast memory.
        bytes_stored: bytes of pages written to a slow tier; a page that never changed is written once.
        bytes_loaded: bytes of whole pages brought back into the pool: to be changed, or read soon.
        promotion_s: seconds that this took, between forwards.
        transfers: transfers that were made.
        transfer_s: seconds that the worker spent on transfers.
        stall_s: seconds that layers waited.
        lead_s: seconds from the end of a prefetch to its use, summed over transfers.
        leads: transfers counted in `lead_s`.
        peak_slow_bytes: most bytes held by the slow tiers.
    """

    bytes_prefetched: int = 0
    bytes_used: int = 0
    bytes_wasted: int = 0
    bytes_demanded: int = 0
    bytes_late: int = 0
    bytes_evicted: int = 0
    bytes_stored: int = 0
    bytes_loaded: int = 0
    promotion_s: float = 0.0
    transfers: int = 0
    transfer_s: float = 0.0
    stall_s: float = 0.0
    lead_s: float = 0.0
    leads: int = 0
    peak_slow_bytes: int = 0

    def to_dict(self) -> dict[str, int | float]:
        """Returns the totals by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What one forward moved between tiers.

    Bytes and seconds as in `TierCounters`; what is prefetched for the next forward counts where it began.

    Attributes:
        bytes_prefetched: see `TierCounters`.
        bytes_used: see `TierCounters`.
        bytes_wasted: see `TierCounters`.
        bytes_late: see `TierCounters`.
        bytes_demanded: see `TierCounters`.
        stall_s: see `TierCounters`.
        lead_s: mean seconds from the end of a prefetch to its use; 0 without any.
        hits: by layer, pages that were in fast memory when the layer asked for them.
        misses: by layer, pages that the layer had to wait for.
    """

    bytes_prefetched: int
    bytes_used: int
    bytes_wasted: int
    bytes_late: int
    bytes_demanded: int
    stall_s: float
    lead_s: float
    hits: Mapping[int, int]
    misses: Mapping[int, int]


@dataclass(slots=True)
class RoutingCounters:
    """Totals of what a policy that selects pages let layers read; all over rows, forwards and routed layers.

    Attributes:
        selections: rows of forwards that read a selection.
        dense_forwards: rows of forwards that read everything: prompts, short texts, nothing known yet.
        tokens_read: keys that routed layers read in selections, new ones and repairs included.
        tokens_present: keys that they would have read without.
        tokens_repaired: of `tokens_read`, those that were asked for only when the true query was known.
        summary_tokens: bytes of key summaries that were scored, in keys and values of as many bytes.
        audits: layers of which the true attention mass was measured.
        audited_mass: sum of the share of it that the pages read had.
    """

    selections: int = 0
    dense_forwards: int = 0
    tokens_read: int = 0
    tokens_present: int = 0
    tokens_repaired: int = 0
    summary_tokens: float = 0.0
    audits: int = 0
    audited_mass: float = 0.0

    def to_dict(self) -> dict[str, float | int | None]:
        """Returns the totals by name, with the shares that they give; None where nothing was counted."""
        read, present = self.tokens_read, self.tokens_present
        return {
            **asdict(self),
            "read_share": read / present if present else None,
            "mass_recall": self.audited_mass / self.audits if self.audits else None,
        }
