"""Joins page table, pool, policy and backend into the cache that one batch decodes with. Knows no model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from oval_core.attention import AttentionBackend
from oval_core.config import OvalConfig
from oval_core.drafting import check_not_drafting, drafting
from oval_core.errors import CacheMismatchError
from oval_core.folding import fold
from oval_core.kv_pool import KVPool
from oval_core.layer_memory import LayerMemory
from oval_core.metrics import CacheCounters, StepMetrics
from oval_core.mixed_pages import append_row, closed_tails, row_regions
from oval_core.page_summary import PageSummaries
from oval_core.page_table import PageTable
from oval_core.plan import with_depths
from oval_core.policy import SelectionPolicy
from oval_core.repaging import Repaged
from oval_core.routing.page_cutter import PageCutter, create_cutter, open_page_size
from oval_core.routing.page_sizer import DynamicPageSizer
from oval_core.storage import ForwardRequest, ResidentStorage
from oval_core.tiers import TieredStorage
from oval_core.values import LayerSpec, PageSelection, RowRequest, StepPlan
from oval_core.vision_config import VisionConfig


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
        self._has_windows = any(window is not None for window in windows)
        self._policy = policy
        self._cutter = create_cutter(config, windows, sizer)
        resident = ResidentStorage(self.table, self.pool, backend, policy)
        tiered = None
        if config.tiers is not None:
            moved = self.counters.tiers
            tiered = TieredStorage(self.table, windows, config, backend, moved, policy)
        self._take(LayerMemory(self.table, len(windows), resident, tiered))
        self._plan: StepPlan | None = None
        self._is_first = False
        self.draft_lengths: Sequence[int] | None = None
        self.foresees = True
        """Whether `commit` tells tiers what the next forward will most likely read; else somebody does before it."""

    def _take(self, memory: LayerMemory) -> None:
        self._memory, self.tiers = memory, memory.tiers
        self.pool, self._summaries = memory.resident.pool, memory.summaries
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
        return self._memory.bytes_allocated

    @property
    def summaries(self) -> PageSummaries:
        """Summaries of the pages, made when asked for."""
        self._memory.check_whole()
        return self._summaries

    def max_new_tokens(self, rows: int) -> int | None:
        """Returns how many tokens a row a forward should bring at most; None where memory sets no limit."""
        return None if self.tiers is None else self.tiers.max_new_tokens(rows)

    def takes(self, rows: Sequence[Sequence[int]]) -> bool:
        """Whether memory takes so many new tokens at once; see `TieredStorage.takes`."""
        return self.tiers is None or self.tiers.takes(rows)

    @property
    def tracks_hidden(self) -> bool:
        """Whether `commit` must be given the last hidden states."""
        cuts = self._cutter is not None and self._cutter.tracks_hidden
        return self.config.track_hidden or self._policy.tracks_hidden or cuts

    @property
    def image_tile(self) -> int:
        """Patches on a side of an image page; see `VisionConfig`."""
        return (self.config.vision or VisionConfig()).tile

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
        if any(request.tree is not None for request in requests):
            requests = with_depths(requests, self.table.sequences, self._has_windows)
        new = list(enumerate(requests))
        regions = [size for row, own in new for size in row_regions(self.table, row, own)]
        closing = closed_tails(self.table, requests)
        self._memory.make_room(regions, self.counters, reserve, closing=closing)
        slots = [append_row(self.table, row, own) for row, own in new]
        self._memory.settle()
        forward = ForwardRequest(
            requests=requests,
            new_slots=slots,
            selection=self._policy.select(self.table.sequences, counts),
            num_queries=num_queries,
            device=device,
            bias=bias,
            has_windows=self._has_windows,
        )
        return self._memory.plan(forward)

    def write(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes keys [B, K, T, D] and values [B, K, T, E] of the running forward."""
        self._check_running()
        self._memory.of_layer[layer_idx].write(layer_idx, keys, values)

    def attend(self, layer_idx: int, query: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
        """Attends with query [B, H, T, D] over what the plan selected; returns [B, T, H, E]."""
        self._check_running()
        return self._memory.of_layer[layer_idx].attend(layer_idx, query, spec)

    def commit(
        self,
        hidden_states: torch.Tensor | None = None,
        accepted: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Makes tokens of the running forward count; the others are dropped and leave no trace.

        Args:
            hidden_states: last hidden states [B, T, C]; needed where `tracks_hidden`.
            accepted: by row, places of the tokens that count among its new ones, ascending; None for all.
        """
        plan = self.plan
        if self.tracks_hidden and hidden_states is not None:
            self.pool.write_hidden(hidden_states, plan)
        num_new = [row.num_new for row in plan.rows]
        if self._cutter is not None:
            self._cutter.collect(num_new, accepted)
        kept = num_new if accepted is None else self._keep(accepted)
        for row, count in enumerate(kept):
            self.table.commit(row, count if accepted is None else accepted[row])
        recut = self._cut(kept)
        self._memory.settle()
        self._policy.commit(self.table.sequences, plan, hidden_states, accepted)
        for row, parts in recut.items():
            self._policy.repaged(row, parts, self.table.sequences[row].length - kept[row])
        looks = self.foresees and self.tiers is not None
        self._end_forward(self._policy.foresee(self.table.sequences) if looks else None)
        self._is_first = False
        self.counters.count_forward(sum(kept), self.table.num_used, self.bytes_allocated)

    def _keep(self, accepted: Sequence[Sequence[int]]) -> list[int]:
        """Brings accepted tokens to the pages that they would have filled alone; returns their numbers by row."""
        # windows and cut pages go by the order of slots; elsewhere most accepted tokens stay in their slots
        tight = self._cutter is not None or self._has_windows
        for row, places in enumerate(accepted):
            copies = fold(self.table.sequences[row], places, tight)
            if copies.src:
                self._memory.copy(copies, self.counters)
        return [len(places) for places in accepted]

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
            self._is_first = False
            self._clear()
        for row in range(self.batch_size):
            self.table.commit(row, 0)
        self._memory.settle()

    def drafting(self, policy: SelectionPolicy) -> AbstractContextManager[None]:
        """Returns a context in which forwards read by another policy and leave no trace when it ends.

        Their tokens, committed or not, are dropped; the policy, its memory and the totals are as before. Growth of
        memory stays. What tiers move for a draft counts, and may leave other pages in fast memory.

        Args:
            policy: another one, of its own; it must know the text already if it is to select (`RoutedPolicy.take_over`).
        Raises:
            CacheMismatchError: no text yet, or a forward runs.
            ConfigError: the policy reads what is not kept.
        """
        return drafting(self, policy)

    def read_by(
        self, policy: SelectionPolicy, cutter: PageCutter | None
    ) -> tuple[SelectionPolicy, PageCutter | None]:
        """Reads by this policy and cuts by this cutter from now on; returns those before. For `drafting`."""
        before = self._policy, self._cutter
        self._policy, self._cutter = policy, cutter
        self._memory.read_by(policy)
        policy.bind(self._summaries, None if cutter is None else cutter.tokens)
        return before

    def drop_after(self, lengths: Sequence[int]) -> None:
        """Drops a draft, where K and V are whole; lengths as before it."""
        self._settle()
        if not self._memory.is_moving:
            self.truncate(lengths)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keeps the first lengths[row] tokens of each row."""
        self._settle()
        if list(lengths) == [seq.length for seq in self.table.sequences]:
            return
        check_not_drafting(self, "truncate")
        before = sum(seq.length for seq in self.table.sequences)
        assert len(lengths) == self.batch_size, "one length a row"
        cut = [p for row, length in enumerate(lengths) for p in self.table.cut_pages(row, length)]
        regions = [r for i, length in enumerate(lengths) for r in self.table.cut_regions(i, length)]
        self._memory.make_room(regions, self.counters, hold=cut)
        for row, length in enumerate(lengths):
            self._memory.copy(self.table.truncate(row, length), self.counters)
        if self._cutter is not None:
            self._cutter.truncate(lengths)
        self._memory.settle()
        self.counters.tokens_dropped += before - sum(lengths)

    def reorder(self, rows: Sequence[int]) -> None:
        """Makes the batch rows[0], rows[1], ... of the old one; a repeated row is forked."""
        check_not_drafting(self, "reorder")
        self._settle()
        self._memory.make_room(self.table.copy_regions(len(rows) - len(set(rows))), self.counters)
        self._memory.copy(self.table.reorder(rows), self.counters)
        self._policy.reorder(rows)
        if self._cutter is not None:
            self._cutter.reorder(rows)
        self._memory.settle()

    def reset(self) -> None:
        """Drops every sequence; memory stays for the next ones."""
        check_not_drafting(self, "reset")
        self._end_forward(None)
        if self._memory.is_moving:
            self._clear()
        self.table.reset()
        self._policy.reset()
        if self._cutter is not None:
            self._cutter.reset()
        self._memory.settle()

    def rest(self) -> None:
        """Ends the worker of the slow tiers until the next forward; nothing is lost."""
        if self.tiers is not None:
            self.tiers.rest()

    def close(self) -> None:
        """Ends threads and files of the slow tiers; what they hold is lost. Twice is harmless."""
        self._memory.close()

    def gather(self, layer_idx: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns copies of K [K, length, D] and V [K, length, E] of one row, in token order."""
        self._memory.check_whole()
        pages = self.table.sequences[row].pages
        keys, values = self._memory.of_layer[layer_idx].read(
            layer_idx, pages, [p.slots for p in pages]
        )
        tokens = torch.tensor([t for p in pages for t in p.tokens], dtype=torch.long)
        order = tokens.argsort().to(keys.device)
        return keys.index_select(1, order), values.index_select(1, order)

    def clone(self, policy: SelectionPolicy | None = None) -> PagedCache:
        """Returns an independent copy, with the same backend; the totals stay common.

        Args:
            policy: in place of a copy of this cache's; it must know the text already.
        """
        check_not_drafting(self, "clone")
        self._settle()
        self._memory.check_whole()
        twin = copy.copy(self)
        twin.table = copy.deepcopy(self.table)
        twin._policy = policy if policy is not None else self._policy.clone()
        twin._cutter = None if self._cutter is None else self._cutter.clone()
        twin._take(self._memory.clone(twin.table, twin._policy))
        return twin

    def _end_forward(self, foreseen: PageSelection | None) -> None:
        self._plan = None
        self.last_step = self._memory.end_forward(foreseen) or self.last_step

    def _clear(self) -> None:
        self.table.reset()
        self._policy.reset()
        if self._cutter is not None:
            self._cutter.reset()
        self._memory.clear()

    def _check_running(self) -> None:
        assert self.plan is not None

    def _settle(self) -> None:
        # An interrupt (Ctrl-C) may end a forward anywhere; what it left is dropped before the next step.
        if self.is_running or any(seq.num_tentative for seq in self.table.sequences):
            self.abort()
