"""K and V of which only a part is in fast memory: the rest waits in slow tiers and is streamed through, exactly.

A forward reads what is in the pool, then the batches of pages that are not, and merges by log-sum-exp. What is moved
when is decided by `Residency` and `PageStream`; it changes times, never results.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import replace

import torch

from oval_core.attention import AttentionBackend
from oval_core.attention.in_parts import Source, attend_in_parts
from oval_core.config import OvalConfig
from oval_core.errors import FastMemoryError, TierError
from oval_core.kv_pool import KVPool
from oval_core.metrics import StepMetrics, TierCounters
from oval_core.mixed_pages import slots_taken
from oval_core.page_layout import Relayout
from oval_core.page_table import PageTable, SlotCopy
from oval_core.pages import Page
from oval_core.policy import SelectionPolicy
from oval_core.routing.page_cutter import open_page_size
from oval_core.storage import ForwardRequest, watch_all, watcher
from oval_core.tiers.fast_memory import share_out
from oval_core.tiers.residency import Residency
from oval_core.tiers.slow_tier import SlowTier
from oval_core.tiers.step_meter import StepMeter
from oval_core.tiers.tier_checks import check_tiers, tiered_layers
from oval_core.tiers.tiered_plan import Group, TieredPlan, TieredPlanner
from oval_core.values import LayerSpec, PageSelection, StepPlan

_PROMOTED_PAGES = 16
"""Chosen pages that come back into the pool between two forwards at most; the others are streamed."""


class TieredStorage:
    """K and V of the tiered layers of one cache, for the pages of its table."""

    def __init__(
        self,
        table: PageTable,
        windows: Sequence[int | None],
        config: OvalConfig,
        backend: AttentionBackend,
        counters: TierCounters,
        policy: SelectionPolicy,
    ) -> None:
        """Makes an empty storage; files, threads and memory come with the first page that needs them.

        Args:
            table: the pages.
            windows: sliding window of each decoder layer.
            config: settings, `tiers` among them.
            backend: what computes attention.
            counters: totals to add to.
            policy: is told what the layers read, and may ask for more.
        Raises:
            ConfigError: the budget is too small, or `dense_layers` names a layer that is not there.
        """
        assert config.tiers is not None, "no tiers in the config"
        check_tiers(config, len(windows))
        self._config, self._tiers = config, config.tiers
        self._table = table
        self._windows = windows
        self._backend = backend
        self._counters = counters
        self._policy = policy
        self.layers = tiered_layers(self._tiers, len(windows))
        self._place = {layer: place for place, layer in enumerate(self.layers)}
        self.memory = share_out(self._tiers.fast_tokens, len(self.layers), open_page_size(config))
        self.pool = KVPool(len(windows))
        self.residency = Residency(
            self.memory.pool_slots, self._tiers.sink_tokens, self._tiers.recent_tokens
        )
        self.slow = SlowTier(self._tiers, self.memory, self.pool, self.layers, counters)
        self._planner = TieredPlanner(self.residency, self.memory.buffer_tokens)
        self._plan: TieredPlan | None = None
        self._request: ForwardRequest | None = None
        self._chosen: Mapping[int, TieredPlan] = {}
        self._groups: Mapping[int, Sequence[Group]] = {}
        self._meter = StepMeter(counters)
        self._forward = 0
        self._num_here = 0
        self._pages_seen = 0

    @property
    def bytes_allocated(self) -> int:
        """Bytes of the pool and of the buffers."""
        return self.pool.bytes_allocated + self.slow.bytes_buffered

    def max_new_tokens(self, rows: int) -> int:
        """Returns how many tokens a row a forward should bring at most; half of the pool is left to older pages."""
        page_size = open_page_size(self._config)
        return max(1, self.memory.half_a_row(rows) // page_size * page_size)

    def takes(self, rows: Sequence[Sequence[int]]) -> bool:
        """Whether the pool holds the new tokens of a forward, and what must stay there besides.

        Args:
            rows: by row, lengths of its new texts and images in turn, a text first and last, which may be empty.
        """
        taken = [slots_taken(self._table, row, counts) for row, counts in enumerate(rows)]
        return sum(taken) <= self.memory.pool_slots

    @property
    def num_away(self) -> int:
        """Pages that are in a slow tier only."""
        return sum(page.page_id not in self.residency for page in self._table.pages())

    def read_by(self, policy: SelectionPolicy) -> None:
        """Lets another policy see what layers read."""
        self._policy = policy

    def relayout(self, relayout: Relayout) -> None:
        """Does nothing: places in the pool do not depend on the table's slots."""

    def make_room(
        self, regions: Sequence[int], hold: Sequence[Page] = (), closing: Sequence[Page] = ()
    ) -> None:
        """Evicts until pages of these sizes fit, and brings back what is about to change.

        Raises:
            FastMemoryError: they do not fit beside the open pages.
            TierError: a page could not be written or read; it is where it was.
        """
        assert self._plan is None, "pages move between forwards only: one that is read stays"
        self.slow.check_open()
        tails = [seq.tail for seq in self._table.sequences if seq.tail is not None]
        closed = {page.page_id for page in closing}
        pages = (page for page in (*hold, *tails) if page.page_id not in closed)
        changing = {page.page_id: page for page in pages}
        for page in changing.values():
            if page.page_id not in self.residency:
                self._evict_for([page.capacity], changing, closed)
                self._bring_back(page)
        self._evict_for(regions, changing, closed)

    def settle(self, released: Sequence[int]) -> None:
        """Follows the table: ended pages leave every tier, new ones get a place in the pool."""
        if released:
            self.slow.forget(set(released), everything=not self._table.sequences)
            for page_id in released:
                self.residency.remove(page_id)
        if self._pages_seen == self._table.num_opened:
            return
        self._pages_seen = self._table.num_opened
        for seq in self._table.sequences:
            before = None
            for page in seq.pages:
                if page.page_id not in self.residency and page.page_id not in self.slow:
                    self.residency.place(page, before)
                before = page

    def plan(self, forward: ForwardRequest) -> StepPlan:
        """Plans a forward and starts to fetch for it; returns the plan over the pool."""
        sequences, selection = self._table.sequences, forward.selection
        self._request = forward
        self._plan = plan = self._planner.plan(sequences, forward)
        chosen = [self._planner.plan_chosen(sequences, forward, rows) for rows in selection.groups]
        self._chosen = {layer: chosen[group] for layer, group in selection.group_of.items()}
        self._forward += 1
        self.residency.scores = selection.scores
        pages = self._pages_read(selection)
        self.residency.read(pages, self._forward)
        self._num_here = len(self.residency.page_ids & pages)
        self._groups = {}
        for place, layer in enumerate(self.layers):
            groups, window = self._chosen.get(layer, plan).groups, self._windows[layer]
            self._groups[place] = [group for group in groups if group.is_seen(window)]
        self._meter.begin()
        self.slow.begin(
            [group.of_layer(place) for place, groups in self._groups.items() for group in groups]
        )
        return plan.fast

    def _pages_read(self, selection: PageSelection) -> set[int]:
        everything = any(layer not in selection.group_of for layer in self.layers)
        if everything or any(pages is None for rows in selection.groups for pages in rows):
            return {page.page_id for page in self._table.pages()}
        rows = [pages for rows in selection.groups for pages in rows if pages is not None]
        return {page.page_id for pages in rows for page in pages}

    def write(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes into the pool."""
        assert self._plan is not None, "write outside a forward"
        self.pool.num_slots = self.memory.pool_slots
        self.pool.write(layer_idx, keys, values, self._plan.fast)

    def attend(self, layer_idx: int, query: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
        """Attends over the pool and over what is brought to it; see `Storage.attend`."""
        assert self._plan is not None, "attend outside a forward"
        place = self._place[layer_idx]
        fast = self._chosen.get(layer_idx, self._plan).fast
        self._meter.asked(layer_idx, True, self._num_here)
        store = self.pool.store(layer_idx)
        if layer_idx not in self._chosen and not self._groups[place]:
            watch_all(self._policy, layer_idx, query, store, fast, spec)
            return self._backend.attend(query, store, fast, spec)
        self.slow.approach(place)
        watch = watcher(self._policy, layer_idx, spec)
        # closed by hand: an error's traceback would keep the buffer that is being read
        with contextlib.closing(self._sources(layer_idx, fast)) as sources:
            return attend_in_parts(self._backend, query, fast, spec, sources, watch)

    def end_forward(self, foreseen: PageSelection | None) -> StepMetrics | None:
        """Ends the forward; what the next one will read begins to come."""
        if self._plan is None:
            return None
        self._plan = self._request = None
        self._groups, self._chosen = {}, {}
        if foreseen is not None:
            self._foresee(foreseen)
        self.slow.end()
        return self._meter.end()

    def _foresee(self, selection: PageSelection) -> None:
        """Brings chosen pages back into the pool in place of those that nobody chose, and expects the rest."""
        self.residency.scores = selection.scores
        chosen = {p.page_id: p for rows in selection.groups for own in rows for p in own or ()}
        tails = [seq.tail for seq in self._table.sequences if seq.tail is not None]
        hold = chosen.keys() | {page.page_id for page in tails}
        away = [page for page in chosen.values() if page.page_id not in self.residency]
        away.sort(key=lambda page: -selection.scores.get(page.page_id, 0.0))
        # an error of a tier fails the forward that needs the page, not the one that has just been committed
        with contextlib.suppress(TierError):
            for page in away[:_PROMOTED_PAGES]:
                if not self._make_fit([page.capacity], hold):
                    break
                self._bring_back(page)
        sequences = self._table.sequences
        batches = [self._planner.batches(sequences, rows) for rows in selection.groups]
        everything = self._planner.batches(sequences, [None] * len(sequences))
        self.slow.expect(
            [
                replace(batch, layer=place)
                for place, layer in enumerate(self.layers)
                for batch in (
                    batches[selection.group_of[layer]]
                    if layer in selection.group_of
                    else everything
                )
            ]
        )

    def copy_slots(self, copies: SlotCopy) -> None:
        """Copies within the pool: the pages of both sides are there."""
        if copies.src:
            src, dst = self._pool_slots(copies.src), self._pool_slots(copies.dst)
            self.pool.copy_slots(SlotCopy(src, dst))

    def read(
        self, layer_idx: int, pages: Sequence[Page], slots: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies out of the pool or of a slow tier; see `Storage.read`."""
        if not pages:
            return self.pool.read(layer_idx, [])
        keys, values = [], []
        for page, own in zip(pages, slots, strict=True):
            if page.page_id in self.residency:
                shift = self.residency.shift(page)
                k, v = self.pool.read(layer_idx, [slot + shift for slot in own])
            else:
                order = sorted(page.slots)
                k, v = self.slow.read(layer_idx, page, [order.index(slot) for slot in own])
            keys.append(k)
            values.append(v)
        return torch.cat(keys, 1), torch.cat(values, 1)

    def clear(self) -> None:
        """Gives all memory back; the slow tiers are empty."""
        self._plan = None
        self.slow.clear()
        self.pool.clear()
        self.residency.clear()

    def rest(self) -> None:
        """Ends the worker until the next forward; nothing is lost."""
        self.slow.rest()

    def close(self) -> None:
        """Ends the worker and removes the file."""
        self.slow.close()

    def clone(self, table: PageTable, policy: SelectionPolicy) -> TieredStorage:
        """Returns an independent copy for copies of the table and of the policy, with a file of its own."""
        twin = TieredStorage(
            table, self._windows, self._config, self._backend, self._counters, policy
        )
        twin.pool = self.pool.clone()
        twin.residency = self.residency.clone()
        twin.slow = SlowTier(self._tiers, twin.memory, twin.pool, twin.layers, self._counters)
        twin._planner = TieredPlanner(twin.residency, twin.memory.buffer_tokens)
        twin.slow.copy_from(self.slow)
        twin._forward, twin._pages_seen = self._forward, self._pages_seen
        return twin

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is in fast memory or in a slow tier, and nothing else is."""
        self.residency.check_integrity()
        pages = {page.page_id for page in self._table.pages()}
        assert self.residency.page_ids <= pages, "a page that ended has a place"
        assert self.slow.page_ids <= pages, "a page that ended has a record"
        assert pages <= self.residency.page_ids | self.slow.page_ids, "a page is nowhere"
        for page in self._table.pages():
            assert page.sealed or page.page_id in self.residency or len(page) < page.capacity

    def _sources(self, layer_idx: int, fast: StepPlan) -> Generator[Source]:
        """Yields the pool, the groups that are brought, then what the policy finds missing when these were read."""
        store = self.pool.store(layer_idx)
        if layer_idx in self._chosen:
            for index, row in enumerate(fast.rows):
                if row.num_new:
                    yield store, [(index, row)]
        else:
            yield store, list(enumerate(fast.rows))
        yield from self._brought(layer_idx, self._groups[self._place[layer_idx]])
        if layer_idx not in self._chosen:
            return
        for index, pages in enumerate(self._policy.missed(layer_idx)):
            if not pages:
                continue
            assert self._request is not None
            seq = self._table.sequences[index]
            here, groups = self._planner.plan_past(seq, self._request, index, pages)
            if here is not None:
                yield store, [(index, here)]
            yield from self._brought(layer_idx, groups)

    def _brought(self, layer_idx: int, groups: Sequence[Group]) -> Generator[Source]:
        if not groups:
            return
        place = self._place[layer_idx]
        batches = [group.of_layer(place) for group in groups]

        def asked(hit: bool, num_pages: int) -> None:
            self._meter.asked(layer_idx, hit, num_pages)

        with contextlib.closing(self.slow.stream(place, batches, asked)) as stores:
            for group, store in zip(groups, stores, strict=True):
                yield store, group.readers

    def _evict_for(
        self, regions: Sequence[int], hold: Mapping[int, Page], closed: Collection[int]
    ) -> None:
        if self._make_fit(regions, hold, closed):
            return
        if sum(regions) <= self.residency.num_free:
            self._join_free(hold)
        if sum(regions) > self.residency.num_free:
            raise FastMemoryError(
                f"a forward needs {sum(regions)} slots in fast memory at once, beside {len(hold)} open pages; the "
                f"pool of tiers.fast_tokens={self._tiers.fast_tokens} has {self.memory.pool_slots}. Pass fewer new "
                "tokens a forward (prefill_chunk_size in generate), fewer rows, or raise tiers.fast_tokens."
            )

    def _join_free(self, held: Mapping[int, Page]) -> None:
        """Makes the free slots one piece, where only these pages are left: they go out, and come back side by side."""
        here = [page for page_id, page in held.items() if page_id in self.residency]
        if here:
            self.slow.store(here, self.residency)
        for page in here:
            self.residency.remove(page.page_id)
        for page in here:
            self._bring_back(page)

    def _make_fit(
        self, regions: Sequence[int], hold: Collection[int], closed: Collection[int] = ()
    ) -> bool:
        """Evicts until pages of these sizes fit; returns whether they do."""
        while not self.residency.fits(regions):
            victims = self.residency.victims(self._table, regions, hold, closed)
            if not victims:
                return False
            self.slow.store(victims, self.residency)
            for page in victims:
                self.residency.remove(page.page_id)
        return True

    def _bring_back(self, page: Page) -> None:
        chunks = self.slow.read_page(page)
        try:
            self.residency.place(page, None)
            shift = self.residency.shift(page)
            slots = [slot + shift for slot in sorted(page.slots)]
            for layer, store in zip(self.layers, chunks, strict=True):
                self.pool.put(layer, slots, store)
        except BaseException:  # an interrupt: half a page must not pass for a whole one
            self.residency.remove(page.page_id)
            raise
        self.residency.version += 1

    def _pool_slots(self, slots: Sequence[int]) -> list[int]:
        pages = sorted(self._table.pages(), key=lambda page: page.base)
        bases = [page.base for page in pages]
        return [s + self.residency.shift(pages[bisect_right(bases, s) - 1]) for s in slots]
