"""Joins page table, pool, policy and backend into the cache that one batch decodes with. Knows no model."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from oval_core.attention import AttentionBackend
from oval_core.config import OvalConfig
from oval_core.errors import CacheMismatchError
from oval_core.kv_pool import KVPool
from oval_core.metrics import CacheCounters
from oval_core.page_summary import PageSummaries
from oval_core.page_table import PageTable, SlotCopy
from oval_core.plan import build_plan
from oval_core.policy import SelectionPolicy
from oval_core.values import LayerSpec, RowRequest, StepPlan


class PagedCache:
    """K and V of a batch of sequences, in pages.

    One forward is `begin` (plan, tokens become tentative), then `write` and `attend` once a layer, then
    `commit` or `abort`. Between forwards: `truncate`, `reorder`, `reset`.
    """

    def __init__(
        self,
        config: OvalConfig,
        num_layers: int,
        policy: SelectionPolicy,
        backend: AttentionBackend,
        has_windows: bool = False,
        counters: CacheCounters | None = None,
    ) -> None:
        self.config = config
        self.table = PageTable(config.page_size)
        self.pool = KVPool(num_layers)
        self._summaries = PageSummaries(self.table, self.pool)
        self.counters = counters if counters is not None else CacheCounters()
        self._policy = policy
        self._backend = backend
        self._has_windows = has_windows
        self._plan: StepPlan | None = None
        self._is_first = False
        self._is_moving = False

    @property
    def plan(self) -> StepPlan:
        """The plan of the running forward; raises `CacheMismatchError` outside of one."""
        if self._plan is None:
            raise CacheMismatchError(
                "this OVAL cache was used outside a forward of the model it is attached to. Allowed: "
                "the attached model, while attached. Attach the model again (or use a new cache, or "
                "`cache.to_dynamic_cache()` to go on with plain Hugging Face)."
            )
        return self._plan

    @property
    def summaries(self) -> PageSummaries:
        """Summaries of the pages, made when asked for."""
        self._check_whole()
        return self._summaries

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
        sequences = self.table.sequences
        selection = self._policy.select(sequences)
        return build_plan(
            sequences, slots, requests, selection, num_queries, device, self._has_windows, bias
        )

    def write(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes keys [B, K, T, D] and values [B, K, T, E] of the running forward."""
        self.pool.write(layer_idx, keys, values, self.plan)

    def attend(self, layer_idx: int, query: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
        """Attends with query [B, H, T, D] over what the plan selected; returns [B, T, H, E]."""
        return self._backend.attend(query, self.pool.store(layer_idx), self.plan, spec)

    def commit(self, hidden_states: torch.Tensor | None = None) -> None:
        """Makes the tokens of the running forward count.

        Args:
            hidden_states: last hidden states [B, T, C], kept when `config.track_hidden`.
        """
        plan = self.plan
        if self.config.track_hidden and hidden_states is not None:
            self.pool.write_hidden(hidden_states, plan)
        for row, row_plan in enumerate(plan.rows):
            self.table.commit(row, row_plan.num_new)
        self._plan = None
        self._is_first = False
        self.counters.count_forward(
            sum(row.num_new for row in plan.rows), self.table.num_used, self.pool.bytes_allocated
        )

    def abort(self) -> None:
        """Drops the tokens of the running forward: the cache is as it was before `begin`."""
        self._plan = None
        if self._is_first:  # nothing is bound yet: not the batch size, nor dtype and head dims
            self._is_first = self._is_moving = False
            self.table.reset()
            self.table.forget_slots()
            self.pool.clear()
        for row in range(self.batch_size):
            self.table.commit(row, 0)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keeps the first lengths[row] tokens of each row."""
        self._settle()
        before = sum(seq.length for seq in self.table.sequences)
        assert len(lengths) == self.batch_size, "one length a row"
        self._make_room(
            [r for row, length in enumerate(lengths) for r in self.table.cut_regions(row, length)]
        )
        for row, length in enumerate(lengths):
            self._copy(self.table.truncate(row, length))
        self.counters.tokens_dropped += before - sum(lengths)

    def reorder(self, rows: Sequence[int]) -> None:
        """Makes the batch rows[0], rows[1], ... of the old one; a repeated row is forked."""
        self._settle()
        self._make_room(self.table.copy_regions(len(rows) - len(set(rows))))
        self._copy(self.table.reorder(rows))

    def reset(self) -> None:
        """Drops every sequence; memory stays for the next ones."""
        self._plan = None
        self.table.reset()
        if self._is_moving:
            self.table.forget_slots()
            self.pool.clear()
            self._is_moving = False

    def gather(self, layer_idx: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns copies of K [K, length, D] and V [K, length, E] of one row, in token order."""
        self._check_whole()
        store = self.pool.store(layer_idx)
        slots = torch.tensor(
            self.table.sequences[row].token_slots(), dtype=torch.long, device=store.keys.device
        )
        return store.keys.index_select(1, slots), store.values.index_select(1, slots)

    def clone(self) -> PagedCache:
        """Returns an independent copy, with the same policy and backend."""
        self._settle()
        self._check_whole()
        layers, counters = len(self.pool.layers), self.counters
        twin = PagedCache(
            self.config, layers, self._policy, self._backend, self._has_windows, counters
        )
        twin.table = copy.deepcopy(self.table)
        twin.pool = self.pool.clone()
        twin._summaries = PageSummaries(twin.table, twin.pool)
        return twin

    def _make_room(self, regions: Sequence[int], reserve: int = 0) -> None:
        self._check_whole()
        relayout = self.table.make_room(regions, reserve)
        if relayout is not None:
            self._is_moving = True
            self.pool.apply(relayout)
            self._is_moving = False
            self.counters.slots_copied += sum(move.size for move in relayout.moves)
            self.counters.pool_growths += 1

    def _copy(self, copies: SlotCopy) -> None:
        self.pool.copy_slots(copies)
        self.counters.slots_copied += len(copies.src)

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
