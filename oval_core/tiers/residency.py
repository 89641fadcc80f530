"""Owns which pages have a place in the fast pool, and who leaves first. Plain integers, no K/V.

States of a sealed page: fast only -> (evicted) slow only -> (loaded to be changed) fast again. Open pages are fast, always.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence, Set

from oval_core.page_table import PageTable
from oval_core.pages import Page, SequencePages
from oval_core.slot_allocator import SlotAllocator


class Residency:
    """Places of pages in a pool of `num_slots` slots.

    Who leaves first: pages that are no sinks and not recent, then of these the lowest score, then the least recently
    read, then the oldest tokens.
    """

    def __init__(self, num_slots: int, sink_tokens: int, recent_tokens: int) -> None:
        self.num_slots = num_slots
        self.version = 0
        """Grows whenever a page that existed comes or goes."""
        self.scores: Mapping[int, float] = {}
        """Wanted-ness by page id, from a policy; a page without one counts 0."""
        self._sinks = sink_tokens
        self._recent = recent_tokens
        self._allocator = SlotAllocator(num_slots)
        self._base: dict[int, int] = {}
        self._capacity: dict[int, int] = {}
        self._read_at: dict[int, int] = {}

    @property
    def num_used(self) -> int:
        """Slots that belong to a page."""
        return self._allocator.num_used

    @property
    def num_free(self) -> int:
        """Slots that belong to none."""
        return self._allocator.num_free

    @property
    def page_ids(self) -> Set[int]:
        """Pages that have a place."""
        return self._base.keys()

    def __contains__(self, page_id: int) -> bool:
        return page_id in self._base

    def shift(self, page: Page) -> int:
        """Returns what to add to a slot of the table to get the pool's slot."""
        return self._base[page.page_id] - page.base

    def fits(self, regions: Sequence[int]) -> bool:
        """Whether pages of these sizes can all be placed."""
        return self._allocator.fits(regions)

    def place(self, page: Page, near: Page | None) -> None:
        """Gives a page a place, behind `near` if that is free; there must be room."""
        wanted = None
        if near is not None and near.page_id in self._base:
            wanted = self._base[near.page_id] + near.capacity
        base = self._allocator.allocate(page.capacity, wanted)
        assert base is not None, "place without make_room"
        self._base[page.page_id] = base
        self._capacity[page.page_id] = page.capacity

    def remove(self, page_id: int) -> None:
        """Takes a page's place away; one without a place is no error."""
        base = self._base.pop(page_id, None)
        if base is not None:
            self._allocator.free(base, self._capacity.pop(page_id))
            self.version += 1
        self._read_at.pop(page_id, None)

    def place_of(self, page: Page) -> int | None:
        """Returns `shift(page)`, or None where the page has no place: a `PlaceOf`."""
        return self.shift(page) if page.page_id in self._base else None

    def repage(self, old: Sequence[Page], new: Sequence[Page]) -> bool:
        """Gives the places of pages to others over the same slots of the table; K/V stay where they are.

        Args:
            old: pages as they were, none of them shared.
            new: pages whose regions lie within those of the old ones.
        Returns:
            False, and nothing is changed, unless all old pages have places, and these lie to each other as the slots do.
        """
        shifts = {self.place_of(page) for page in old}
        if None in shifts or len(shifts) != 1:
            return False
        shift = self.shift(old[0])
        read_at = max(self._read_at.get(page.page_id, 0) for page in old)
        for page in old:
            self.remove(page.page_id)
        for page in new:
            base = self._allocator.allocate(page.capacity, page.base + shift)
            assert base == page.base + shift, "the regions of the old pages are taken"
            self._base[page.page_id] = base
            self._capacity[page.page_id] = page.capacity
            if read_at:
                self._read_at[page.page_id] = read_at
        self.version += 1
        return True

    def shrink(self, page: Page) -> None:
        """Follows a page whose region lost its end; one without a place is no error."""
        base, old = self._base.get(page.page_id), self._capacity.get(page.page_id, 0)
        if base is not None and page.capacity < old:
            self._allocator.free(base + page.capacity, old - page.capacity)
            self._capacity[page.page_id] = page.capacity

    def read(self, page_ids: Collection[int], forward: int) -> None:
        """Notes that a forward reads these pages."""
        for page_id in page_ids:
            self._read_at[page_id] = forward

    def victims(
        self,
        table: PageTable,
        regions: Sequence[int],
        hold: Collection[int],
        closed: Collection[int] = (),
    ) -> list[Page]:
        """Returns pages that must leave so that regions of these sizes may fit, first to leave first.

        Open pages and those in `hold` never leave, but for those in `closed`, which are about to be sealed as they are.
        The list may be too short, where nothing else may leave.
        """
        missing = sum(regions) - self._allocator.num_free
        near = {page.page_id for seq in table.sequences for page in self._kept_longest(seq)}
        may_leave = [
            page
            for page in table.pages()
            if page.page_id in self._base
            and (page.sealed or page.page_id in closed)
            and page.page_id not in hold
        ]
        may_leave.sort(
            key=lambda page: (
                page.page_id in near,
                self.scores.get(page.page_id, 0.0),
                self._read_at.get(page.page_id, 0),
                page.tokens[0],
            )
        )
        chosen: list[Page] = []
        while may_leave and missing > 0:
            page = may_leave.pop(0)
            chosen.append(page)
            missing -= page.capacity
        if not chosen:  # enough slots, but scattered
            chosen = may_leave[:1]
        return chosen

    def clear(self) -> None:
        """Takes every place away."""
        self._allocator = SlotAllocator(self.num_slots)
        self._base, self._capacity, self._read_at = {}, {}, {}
        self.scores = {}
        self.version += 1

    def clone(self) -> Residency:
        """Returns an independent copy."""
        return copy.deepcopy(self)

    def check_integrity(self) -> None:
        """Raises AssertionError if an invariant does not hold."""
        self._allocator.check_integrity()
        taken: set[int] = set()
        for page_id, base in self._base.items():
            region = set(range(base, base + self._capacity[page_id]))
            assert not taken & region, "a slot belongs to two pages"
            taken |= region
        assert len(taken) == self.num_used

    def _kept_longest(self, seq: SequencePages) -> list[Page]:
        kept = []
        for page in seq.pages:
            if page.tokens[0] >= self._sinks:
                break
            kept.append(page)
        for page in reversed(seq.pages):
            if page.tokens[-1] < seq.length - self._recent:
                break
            kept.append(page)
        return kept
