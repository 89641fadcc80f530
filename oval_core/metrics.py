"""Counts what caches did. Holds numbers only; asks nobody."""

from __future__ import annotations

from dataclasses import asdict, dataclass


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
    """

    forwards: int = 0
    tokens_written: int = 0
    tokens_dropped: int = 0
    slots_copied: int = 0
    pool_growths: int = 0
    peak_slots: int = 0
    peak_bytes: int = 0

    def count_forward(self, num_tokens: int, num_slots: int, num_bytes: int) -> None:
        """Counts one committed forward."""
        self.forwards += 1
        self.tokens_written += num_tokens
        self.peak_slots = max(self.peak_slots, num_slots)
        self.peak_bytes = max(self.peak_bytes, num_bytes)

    def to_dict(self) -> dict[str, int]:
        """Returns the totals by name."""
        return asdict(self)
