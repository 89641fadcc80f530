"""Joins page table, pool, policy and backend into the cache that one batch decodes with. Knows no model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import cast

import torch

from oval_core.attention import AttentionBackend
from oval_core.config import OvalConfig
from oval_core.errors import CacheMismatchError
from oval_core.kv_pool import KVPool
from oval_core.metrics import CacheCounters, StepMetrics
from oval_core.page_summary import PageSummaries, ReadKeys
from oval_core.page_table import PageTable, SlotCopy
from oval_core.pages import Page
from oval_core.policy import SelectionPolicy
from oval_core.repaging import Repaged
from oval_core.routing.page_cutter import create_cutter, open_page_size
from oval_core.routing.page_sizer import DynamicPageSizer
from oval_core.storage import ForwardRequest, ResidentStorage, Storage
from oval_core.tiers import TieredStorage
from oval_core.values import LayerSpec, PageSelection, RowRequest, StepPlan


class PagedCache:
    """K and V of a batch of sequences, in pages.

    One forward is `begin` (plan, tokens become tentative), then `write` and `attend` once a layer, then
    `commit` or `abort`. Between forwards: `truncate`, `reorder`, `reset`. `close` ends what `tiers` opened.
    """

    def __init__(
        self,
        config: OvalConfig,
        windows: Sequence[int | None],
        policy: SelectionPolicy,
        backend: AttentionBackend,
        counters: CacheCounters | None = None,
        sizer: DynamicPageSizer | None = None,
    ) -> None:
        """Makes an empty cache.

        Args:
            config: settings.
            windows: sliding window of each decoder layer, None where it reads everything.
            policy: which pages a query reads.
            backend: what computes attention.
            counters: totals to add to; None for new ones.
            sizer: what cuts pages under `routing.sizing: dynamic`.
        Raises:
            ConfigError: `config.tiers` has too little fast memory for so many layers, or a sizer is missing.
        """
        self.config = config
        self.table = PageTable(open_page_size(config))
        self.pool = KVPool(len(windows))
        self.counters = counters if counters is not None else CacheCounters()
        self.last_step: StepMetrics | None = None
        self._windows = windows
        self._policy = policy
        self._cutter = create_cutter(config, windows, sizer)
        resident = ResidentStorage(self.table, self.pool, backend, policy)
        tiered = None
        if config.tiers is not None:
            moved = self.counters.tiers
            tiered = TieredStorage(self.table, windows, config, backend, moved, policy)
        self._set_storages(resident, tiered)
        self._plan: StepPlan | None = None
        self._is_first = False
        self._is_moving = False

    def _set_storages(self, resident: ResidentStorage, tiered: TieredStorage | None) -> None:
        self.tiers = tiered
        self._storages: list[Storage] = [resident] if tiered is None else [resident, tiered]
        layers = range(len(self._windows))
        self._of_layer: list[Storage] = [
            tiered if tiered is not None and i in tiered.layers else resident for i in layers
        ]
        self._summaries = PageSummaries(self.table, self.pool, _key_reader(self._of_layer))
        cutter = self._cutter
        self._policy.bind(self._summaries, None if cutter is None else cutter.tokens)
        if cutter is not None:
            cutter.bind(self.table, self.pool, self._summaries.read_keys)

    @property
    def plan(self) -> StepPlan:
        """The plan of the running forward over the table's slots; raises `CacheMismatchError` outside of one."""
        if self._plan is None:
            raise CacheMismatchError(
                "this OVAL cache was used outside a forward of the model it is attached to. Allowed: "
                "the attached model, while attached. Attach the model again (or use a new cache, or "
                "`cache.to_dynamic_cache()` to go on with plain Hugging Face)."
            )
        return self._plan

    @property
    def bytes_allocated(self) -> int:
        """Bytes of fast memory set aside for K and V."""
        return sum(storage.bytes_allocated for storage in self._storages)

    @property
    def summaries(self) -> PageSummaries:
        """Summaries of the pages, made when asked for."""
        self._check_whole()
        return self._summaries

    def max_new_tokens(self, rows: int) -> int | None:
        """Returns how many tokens a row a forward should bring at most; None where memory sets no limit."""
        return None if self.tiers is None else self.tiers.max_new_tokens(rows)

    @property
    def tracks_hidden(self) -> bool:
        """Whether `commit` must be given the last hidden states."""
        cuts = self._cutter is not None and self._cutter.tracks_hidden
        return self.config.track_hidden or self._policy.tracks_hidden or cuts

    @property
    def policy(self) -> SelectionPolicy:
        """What chooses the pages that forwards read."""
        return self._policy

    @property
    def is_running(self) -> bool:
        """Whether a forward has begun and neither committed nor aborted."""
        return self._plan is not None

    @property
    def batch_size(self) -> int:
        """Number of sequences; 0 before the first forward."""
        return len(self.table.sequences)

    def begin(
        self,
        requests: Sequence[RowRequest],
        num_queries: int,
        device: torch.device,
        reserve: int = 0,
        bias: torch.Tensor | None = None,
    ) -> StepPlan:
        """Plans one forward and appends its tokens, tentatively.

        Args:
            requests: one a row.
            num_queries: T, padding included.
            device: device of the model.
            reserve: slots to set aside for each row if the pool must grow.
            bias: see `StepPlan`.
        """
        self._settle()
        if not self.batch_size:
            self.table.open_sequences(len(requests))
            self._is_first = True
        try:
            self._plan = self._append(requests, num_queries, device, reserve, bias)
        except BaseException:
            self.abort()
            raise
        return self._plan

    def _append(
        self,
        requests: Sequence[RowRequest],
        num_queries: int,
        device: torch.device,
        reserve: int,
        bias: torch.Tensor | None,
    ) -> StepPlan:
        counts = [request.num_new for request in requests]
        self._make_room(
            [r for row, n in enumerate(counts) for r in self.table.text_regions(row, n)], reserve
        )
        slots = [self.table.append(row, count).slots for row, count in enumerate(counts)]
        self._settle_pages()
        forward = ForwardRequest(
            requests=requests,
            new_slots=slots,
            selection=self._policy.select(self.table.sequences, counts),
            num_queries=num_queries,
            device=device,
            bias=bias,
            has_windows=any(window is not None for window in self._windows),
        )
        plan, *_ = [storage.plan(forward) for storage in self._storages]
        return plan

    def write(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes keys [B, K, T, D] and values [B, K, T, E] of the running forward."""
        self._check_running()
        self._of_layer[layer_idx].write(layer_idx, keys, values)

    def attend(self, layer_idx: int, query: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
        """Attends with query [B, H, T, D] over what the plan selected; returns [B, T, H, E]."""
        self._check_running()
        return self._of_layer[layer_idx].attend(layer_idx, query, spec)

    def commit(self, hidden_states: torch.Tensor | None = None) -> None:
        """Makes the tokens of the running forward count.

        Args:
            hidden_states: last hidden states [B, T, C]; needed where `tracks_hidden`.
        """
        plan = self.plan
        if self.tracks_hidden and hidden_states is not None:
            self.pool.write_hidden(hidden_states, plan)
        for row, row_plan in enumerate(plan.rows):
            self.table.commit(row, row_plan.num_new)
        recut = self._cut([row_plan.num_new for row_plan in plan.rows])
        self._settle_pages()
        self._policy.commit(self.table.sequences, plan, hidden_states)
        for row, parts in recut.items():
            num_known = self.table.sequences[row].length - plan.rows[row].num_new
            self._policy.repaged(row, parts, num_known)
        foreseen = None if self.tiers is None else self._policy.foresee(self.table.sequences)
        self._end_forward(foreseen)
        self._is_first = False
        self.counters.count_forward(
            sum(row.num_new for row in plan.rows), self.table.num_used, self.bytes_allocated
        )

    def _cut(self, num_new: Sequence[int]) -> Mapping[int, Sequence[Repaged]]:
        if self._cutter is None:
            return {}
        return self._cutter.follow(num_new, None if self.tiers is None else self.tiers.residency)

    def abort(self) -> None:
        """Drops the tokens of the running forward: the cache is as it was before `begin`."""
        self._end_forward(None)
        self._policy.abort()
        if self._cutter is not None:
            self._cutter.abort()
        if self._is_first:  # nothing is bound yet: not the batch size, nor dtype and head dims
            self._is_first = self._is_moving = False
            self._clear()
        for row in range(self.batch_size):
            self.table.commit(row, 0)
        self._settle_pages()

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keeps the first lengths[row] tokens of each row."""
        self._settle()
        before = sum(seq.length for seq in self.table.sequences)
        assert len(lengths) == self.batch_size, "one length a row"
        cut = [p for row, length in enumerate(lengths) for p in self.table.cut_pages(row, length)]
        regions = [r for i, length in enumerate(lengths) for r in self.table.cut_regions(i, length)]
        self._make_room(regions, hold=cut)
        for row, length in enumerate(lengths):
            self._copy(self.table.truncate(row, length))
        if self._cutter is not None:
            self._cutter.truncate(lengths)
        self._settle_pages()
        self.counters.tokens_dropped += before - sum(lengths)

    def reorder(self, rows: Sequence[int]) -> None:
        """Makes the batch rows[0], rows[1], ... of the old one; a repeated row is forked."""
        self._settle()
        self._make_room(self.table.copy_regions(len(rows) - len(set(rows))))
        self._copy(self.table.reorder(rows))
        self._policy.reorder(rows)
        if self._cutter is not None:
            self._cutter.reorder(rows)
        self._settle_pages()

    def reset(self) -> None:
        """Drops every sequence; memory stays for the next ones."""
        self._end_forward(None)
        if self._is_moving:
            self._clear()
            self._is_moving = False
        self.table.reset()
        self._policy.reset()
        if self._cutter is not None:
            self._cutter.reset()
        self._settle_pages()

    def rest(self) -> None:
        """Ends the worker of the slow tiers until the next forward; nothing is lost."""
        if self.tiers is not None:
            self.tiers.rest()

    def close(self) -> None:
        """Ends threads and files of the slow tiers; what they hold is lost. Twice is harmless."""
        for storage in self._storages:
            storage.close()

    def gather(self, layer_idx: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns copies of K [K, length, D] and V [K, length, E] of one row, in token order."""
        self._check_whole()
        pages = self.table.sequences[row].pages
        keys, values = self._of_layer[layer_idx].read(layer_idx, pages, [p.slots for p in pages])
        tokens = torch.tensor([t for p in pages for t in p.tokens], dtype=torch.long)
        order = tokens.argsort().to(keys.device)
        return keys.index_select(1, order), values.index_select(1, order)

    def clone(self, policy: SelectionPolicy | None = None) -> PagedCache:
        """Returns an independent copy, with the same backend; the totals stay common.

        Args:
            policy: in place of a copy of this cache's; it must know the text already.
        """
        self._settle()
        self._check_whole()
        twin = copy.copy(self)
        twin.table = copy.deepcopy(self.table)
        twin._policy = policy if policy is not None else self._policy.clone()
        twin._cutter = None if self._cutter is None else self._cutter.clone()
        resident, *tiered = [storage.clone(twin.table, twin._policy) for storage in self._storages]
        assert isinstance(resident, ResidentStorage)
        twin.pool = resident.pool
        twin._set_storages(resident, cast("TieredStorage", tiered[0]) if tiered else None)
        return twin

    def _make_room(
        self, regions: Sequence[int], reserve: int = 0, hold: Sequence[Page] = ()
    ) -> None:
        self._check_whole()
        for storage in self._storages:
            storage.make_room(regions, hold)
        relayout = self.table.make_room(regions, reserve)
        if relayout is not None:
            self._is_moving = True
            for storage in self._storages:
                storage.relayout(relayout)
            self._is_moving = False
            self.counters.slots_copied += sum(move.size for move in relayout.moves)
            self.counters.pool_growths += 1

    def _copy(self, copies: SlotCopy) -> None:
        if copies.src:
            self._settle_pages()  # new pages get their place before K/V are copied to it
        for storage in self._storages:
            storage.copy_slots(copies)
        self.counters.slots_copied += len(copies.src)

    def _settle_pages(self) -> None:
        released = self.table.take_released()
        for storage in self._storages:
            storage.settle(released)

    def _end_forward(self, foreseen: PageSelection | None) -> None:
        self._plan = None
        for storage in self._storages:
            self.last_step = storage.end_forward(foreseen) or self.last_step

    def _clear(self) -> None:
        self.table.reset()
        self._policy.reset()
        if self._cutter is not None:
            self._cutter.reset()
        self.table.forget_slots()
        for storage in self._storages:
            storage.clear()

    def _check_running(self) -> None:
        assert self.plan is not None

    def _check_whole(self) -> None:
        if self._is_moving:
            raise CacheMismatchError(
                "this OVAL cache was interrupted while it grew (out of memory, or Ctrl-C), so its K/V are not "
                "whole. Allowed: a new cache. Prefill again with `oval.new_cache()`, or free memory first."
            )

    def _settle(self) -> None:
        # An interrupt (Ctrl-C) may end a forward anywhere; what it left is dropped before the next step.
        if self.is_running or any(seq.num_tentative for seq in self.table.sequences):
            self.abort()


def _key_reader(of_layer: Sequence[Storage]) -> ReadKeys:
    # no method of the cache: that would be a cycle, and a cache that nobody holds must end at once
    def read(layer_idx: int, pages: Sequence[Page], slots: Sequence[Sequence[int]]) -> torch.Tensor:
        return of_layer[layer_idx].read(layer_idx, pages, slots)[0]

    return read
