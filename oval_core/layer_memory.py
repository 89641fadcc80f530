"""Keeps the storages of all layers and the page table in step: room, moves, copies, ends of pages. Plans no forward itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from oval_core.errors import CacheMismatchError
from oval_core.metrics import CacheCounters, StepMetrics
from oval_core.page_summary import PageSummaries
from oval_core.page_table import PageTable, SlotCopy
from oval_core.pages import Page
from oval_core.policy import SelectionPolicy
from oval_core.storage import ForwardRequest, ResidentStorage, Storage, key_reader
from oval_core.tiers import TieredStorage
from oval_core.values import PageSelection, StepPlan


class LayerMemory:
    """The storages of one cache: one that holds all, and one with tiers if there is one."""

    def __init__(
        self,
        table: PageTable,
        num_layers: int,
        resident: ResidentStorage,
        tiered: TieredStorage | None,
    ) -> None:
        self.table, self.tiers = table, tiered
        self.is_moving = False
        self._num_layers, self._resident = num_layers, resident
        self._all: list[Storage] = [resident] if tiered is None else [resident, tiered]
        self.of_layer: list[Storage] = [
            tiered if tiered is not None and layer in tiered.layers else resident
            for layer in range(num_layers)
        ]
        self.summaries = PageSummaries(table, resident.pool, key_reader(self.of_layer))

    @property
    def bytes_allocated(self) -> int:
        """Bytes of fast memory set aside."""
        return sum(storage.bytes_allocated for storage in self._all)

    def read_by(self, policy: SelectionPolicy) -> None:
        """Lets another policy see what layers read."""
        for storage in self._all:
            storage.read_by(policy)

    def plan(self, forward: ForwardRequest) -> StepPlan:
        """Plans a forward in every storage; returns the plan over the table's slots."""
        plan, *_ = [storage.plan(forward) for storage in self._all]
        return plan

    def make_room(
        self,
        regions: Sequence[int],
        counters: CacheCounters,
        reserve: int = 0,
        hold: Sequence[Page] = (),
        closing: Sequence[Page] = (),
    ) -> None:
        """Makes sure that new pages of these sizes fit; see `Storage.make_room` and `PageTable.make_room`."""
        self.check_whole()
        for storage in self._all:
            storage.make_room(regions, hold, closing)
        relayout = self.table.make_room(regions, reserve)
        if relayout is not None:
            self.is_moving = True
            for storage in self._all:
                storage.relayout(relayout)
            self.is_moving = False
            counters.slots_copied += sum(move.size for move in relayout.moves)
            counters.pool_growths += 1

    def copy(self, copies: SlotCopy, counters: CacheCounters) -> None:
        """Copies K/V within every storage."""
        if copies.src:
            self.settle()  # new pages get their place before K/V are copied to it
        for storage in self._all:
            storage.copy_slots(copies)
        counters.slots_copied += len(copies.src)

    def settle(self) -> None:
        """Follows the table after any change of its pages."""
        released = self.table.take_released()
        for storage in self._all:
            storage.settle(released)

    def end_forward(self, foreseen: PageSelection | None) -> StepMetrics | None:
        """Ends the planned forward; returns what it moved, if anything can move."""
        moved = [storage.end_forward(foreseen) for storage in self._all]
        return moved[-1]

    def clear(self) -> None:
        """Gives all memory back; the table must be empty."""
        self.table.forget_slots()
        for storage in self._all:
            storage.clear()
        self.is_moving = False

    def close(self) -> None:
        """Ends threads and files."""
        for storage in self._all:
            storage.close()

    def clone(self, table: PageTable, policy: SelectionPolicy) -> LayerMemory:
        """Returns an independent copy for copies of the table and of the policy."""
        resident, *tiered = [storage.clone(table, policy) for storage in self._all]
        of_tiers = cast("TieredStorage", tiered[0]) if tiered else None
        return LayerMemory(table, self._num_layers, cast("ResidentStorage", resident), of_tiers)

    @property
    def resident(self) -> ResidentStorage:
        """The storage whose pool has the table's slots."""
        return self._resident

    def check_whole(self) -> None:
        """Raises `CacheMismatchError` if a move of K and V was cut off."""
        if self.is_moving:
            raise CacheMismatchError(
                "this OVAL cache was interrupted while it grew (out of memory, or Ctrl-C), so its K/V are not "
                "whole. Allowed: a new cache. Prefill again with `oval.new_cache()`, or free memory first."
            )
