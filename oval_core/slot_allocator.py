"""Owns which slots of a pool are free: contiguous regions in [0, num_slots). Plain integers, no tensors."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence


class SlotAllocator:
    """Hands out contiguous regions of slots, next to a wanted place when that place is free.

    Free space is kept as disjoint, sorted, merged intervals [start, end). At all times
    `num_free + num_used == num_slots`.
    """

    def __init__(self, num_slots: int = 0) -> None:
        self._starts: list[int] = [0] if num_slots else []
        self._ends: list[int] = [num_slots] if num_slots else []
        self.num_slots = num_slots
        self.num_free = num_slots

    @property
    def num_used(self) -> int:
        """Slots that belong to some region."""
        return self.num_slots - self.num_free

    def allocate(self, size: int, near: int | None = None) -> int | None:
        """Takes `size` contiguous slots and returns the first, or None when no interval is long enough.

        Args:
            size: slots wanted, at least 1.
            near: first slot wanted. If [near, near + size) is not free, the longest free interval serves.
        """
        if near is not None:
            i = bisect_right(self._starts, near) - 1
            if i >= 0 and near + size <= self._ends[i]:
                self._carve(i, near, near + size)
                return near
        i = max(range(len(self._starts)), key=self._length, default=-1)
        if i < 0 or self._length(i) < size:
            return None
        start = self._starts[i]
        self._carve(i, start, start + size)
        return start

    def free(self, start: int, size: int) -> None:
        """Gives back the region [start, start + size)."""
        end = start + size
        i = bisect_left(self._starts, start)
        assert 0 <= start < end <= self.num_slots, "region outside the pool"
        assert i == 0 or self._ends[i - 1] <= start, "slots freed twice"
        assert i == len(self._starts) or end <= self._starts[i], "slots freed twice"
        joins_left = i > 0 and self._ends[i - 1] == start
        joins_right = i < len(self._starts) and self._starts[i] == end
        if joins_left and joins_right:
            self._ends[i - 1] = self._ends[i]
            del self._starts[i], self._ends[i]
        elif joins_left:
            self._ends[i - 1] = end
        elif joins_right:
            self._starts[i] = start
        else:
            self._starts.insert(i, start)
            self._ends.insert(i, end)
        self.num_free += size

    def grow(self, count: int) -> None:
        """Adds `count` slots at the end."""
        self.num_slots += count
        self.free(self.num_slots - count, count)

    def fits(self, sizes: Sequence[int], spare: int = 0) -> bool:
        """Whether regions of these sizes can all be allocated. May say no where a lucky order would fit.

        Args:
            sizes: of the regions.
            spare: slots that must be free besides, so that some regions may start within an interval: each such start
                costs as much as the largest region.
        """
        if not sizes:
            return True
        largest = max(sizes)
        # An allocation fails only where every interval is shorter than its region.
        lost = len(self._starts) * (largest - 1)
        if self.num_free - lost >= sum(sizes) + spare:
            return True
        room = sum((e - s) // largest for s, e in zip(self._starts, self._ends, strict=True))
        return not spare and room >= len(sizes)

    def check_integrity(self) -> None:
        """Raises AssertionError if an invariant of the free list does not hold."""
        assert self.num_free == sum(e - s for s, e in zip(self._starts, self._ends, strict=True))
        for i, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            assert 0 <= start < end <= self.num_slots
            assert i == 0 or self._ends[i - 1] < start, "intervals touch or overlap"

    def _length(self, i: int) -> int:
        return self._ends[i] - self._starts[i]

    def _carve(self, i: int, start: int, end: int) -> None:
        # interval i: [ left rest | start .. end | right rest ]
        left, right = self._starts[i], self._ends[i]
        rests = [(a, b) for a, b in ((left, start), (end, right)) if a < b]
        self._starts[i : i + 1] = [a for a, _ in rests]
        self._ends[i : i + 1] = [b for _, b in rests]
        self.num_free -= end - start
