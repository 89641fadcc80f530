"""The free list: nothing is lost, nothing is given twice, neighbours merge, `near` and `fits` keep their word."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from oval_core.slot_allocator import SlotAllocator


class AllocatorMachine(RuleBasedStateMachine):
    """Against a set of the slots that are taken."""

    @initialize(num_slots=st.integers(0, 120))
    def start(self, num_slots: int) -> None:
        self.allocator = SlotAllocator(num_slots)
        self.num_slots = num_slots
        self.regions: list[tuple[int, int]] = []

    def taken(self) -> set[int]:
        return {slot for start, size in self.regions for slot in range(start, start + size)}

    def longest_free(self) -> int:
        taken, best, run = self.taken(), 0, 0
        for slot in range(self.num_slots):
            run = 0 if slot in taken else run + 1
            best = max(best, run)
        return best

    @rule(size=st.integers(1, 33), near=st.one_of(st.none(), st.integers(-2, 125)))
    def allocate(self, size: int, near: int | None) -> None:
        taken, longest = self.taken(), self.longest_free()
        start = self.allocator.allocate(size, near)
        wanted = range(0) if near is None else range(near, near + size)
        if wanted and wanted[0] >= 0 and wanted[-1] < self.num_slots and not taken & set(wanted):
            assert start == near, "the wanted place was free"
        if start is None:
            assert longest < size, "an interval was long enough"
            return
        assert start >= 0
        assert start + size <= self.num_slots
        assert not taken & set(range(start, start + size)), "slots given twice"
        self.regions.append((start, size))

    @precondition(lambda self: self.regions)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.regions) - 1))
        self.allocator.free(*self.regions.pop(index))

    @precondition(lambda self: self.regions)
    @rule(data=st.data())
    def free_a_part(self, data: st.DataObject) -> None:
        start, size = self.regions.pop(data.draw(st.integers(0, len(self.regions) - 1)))
        cut = data.draw(st.integers(0, size - 1))
        self.allocator.free(start + cut, size - cut)
        if cut:
            self.regions.append((start, cut))

    @precondition(lambda self: self.num_slots - len(self.taken()) > 0)
    @rule(data=st.data())
    def free_twice_is_refused(self, data: st.DataObject) -> None:
        vacant = sorted(set(range(self.num_slots)) - self.taken())
        start = data.draw(st.sampled_from(vacant))
        with pytest.raises(AssertionError):
            self.allocator.free(start, 1)
        if start and start - 1 in self.taken():
            with pytest.raises(AssertionError):
                self.allocator.free(start - 1, 2)

    @invariant()
    def free_and_used_are_all(self) -> None:
        self.allocator.check_integrity()
        assert self.allocator.num_used == len(self.taken())
        assert self.allocator.num_free == self.num_slots - len(self.taken())
        # merged: the longest interval is as long as the longest run of free slots
        assert self.longest_free() == 0 or self.allocator.fits([self.longest_free()])
        assert not self.allocator.fits([self.longest_free() + 1])


AllocatorMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True
)
TestAllocator = AllocatorMachine.TestCase


@st.composite
def used_allocators(draw: st.DrawFn) -> SlotAllocator:
    """An allocator with holes."""
    allocator = SlotAllocator(draw(st.integers(1, 200)))
    for start, size in draw(
        st.lists(st.tuples(st.integers(0, 200), st.integers(1, 20)), max_size=8)
    ):
        allocator.allocate(size, near=start)
    return allocator


@settings(max_examples=200, deadline=None, derandomize=True)
@given(used_allocators(), st.lists(st.integers(1, 32), min_size=1, max_size=8), st.data())
def test_what_fits_can_be_allocated_in_any_order(
    allocator: SlotAllocator, sizes: list[int], data: st.DataObject
) -> None:
    if not allocator.fits(sizes):
        return
    end = None
    for size in data.draw(st.permutations(sizes)):
        smaller = data.draw(st.integers(1, size))
        # as a page table does: anywhere, or right behind the last region
        start = allocator.allocate(smaller, near=data.draw(st.sampled_from([None, end])))
        assert start is not None
        end = start + smaller
    allocator.check_integrity()


def test_fits_counts_whole_regions_only() -> None:
    allocator = SlotAllocator(40)
    assert allocator.allocate(8, near=16) == 16  # 16 free | 8 used | 16 free
    assert allocator.fits([16, 16])
    assert allocator.fits([])
    assert not allocator.fits([17])
    assert not allocator.fits([9, 9, 9])
    assert not SlotAllocator(0).fits([1])


def test_near_that_is_taken_falls_to_the_longest_interval() -> None:
    allocator = SlotAllocator(40)
    allocator.allocate(8, near=8)  # 8 free | 8 used | 24 free
    assert allocator.allocate(4, near=12) == 16
    assert allocator.allocate(4, near=38) == 20, "the end of the pool is too near"
    assert allocator.allocate(8) == 24
    assert allocator.allocate(9) is None
    assert allocator.num_free == 16


@pytest.mark.parametrize(("start", "size"), [(-1, 2), (39, 2), (5, 0), (40, 1)])
def test_a_region_outside_the_pool_is_refused(start: int, size: int) -> None:
    allocator = SlotAllocator(40)
    allocator.allocate(40)
    with pytest.raises(AssertionError, match="outside"):
        allocator.free(start, size)
