"""Where the K and V of some layers are kept: one contract for memory that holds all and for memory that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from oval_core.attention import AttentionBackend
from oval_core.attention.base import row_bias, row_query
from oval_core.attention.in_parts import Source, Watch, attend_in_parts
from oval_core.kv_pool import KVPool, LayerStore
from oval_core.metrics import StepMetrics
from oval_core.page_layout import Relayout
from oval_core.page_summary import ReadKeys
from oval_core.page_table import PageTable, SlotCopy
from oval_core.pages import Page, SequencePages, end_in_order, key_tokens_of, runs_of
from oval_core.plan import build_plan, row_plan
from oval_core.policy import SelectionPolicy
from oval_core.values import (
    LayerSpec,
    PageSelection,
    RowPages,
    RowPagesChosen,
    RowPlan,
    RowRequest,
    StepPlan,
)


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """What a forward asks of a storage; see `PagedCache.begin` for the fields."""

    requests: Sequence[RowRequest]
    new_slots: Sequence[Sequence[int]]
    selection: PageSelection
    num_queries: int
    device: torch.device
    bias: torch.Tensor | None
    has_windows: bool

    def needs_tokens(self, row: int) -> bool:
        """Whether some layer must know the token behind each key, and not only which keys are new."""
        return self.has_windows or self.bias is not None or self.requests[row].hidden is not None

    def key_tokens(self, row: int, pages: Sequence[Page], first_new: int) -> list[int] | None:
        """Returns the tokens behind the keys of some pages, those from `first_new` on new; None if order says enough."""
        is_enough = self.num_queries == 1 or end_in_order(pages, first_new)
        if is_enough and not self.needs_tokens(row):
            return None
        return key_tokens_of(pages, first_new)


class Storage(Protocol):
    """K and V of some layers of one cache, addressed by the pages and slots of its `PageTable`."""

    @property
    def bytes_allocated(self) -> int:
        """Bytes of fast memory set aside."""
        ...

    def read_by(self, policy: SelectionPolicy) -> None:
        """Lets another policy see what layers read."""
        ...

    def relayout(self, relayout: Relayout) -> None:
        """Follows a new layout of the table's slots."""
        ...

    def make_room(
        self, regions: Sequence[int], hold: Sequence[Page] = (), closing: Sequence[Page] = ()
    ) -> None:
        """Makes sure that new pages of these sizes, the open pages, and the pages to `hold` can be written.

        Open pages in `closing` take no more tokens: they are about to be sealed as they are.
        """
        ...

    def settle(self, released: Sequence[int]) -> None:
        """Follows the table after any change of its pages; `released` are the ids of those that ended."""
        ...

    def plan(self, forward: ForwardRequest) -> StepPlan:
        """Plans the forward whose tokens have just been appended."""
        ...

    def write(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes keys [B, K, T, D] and values [B, K, T, E] of the planned forward."""
        ...

    def attend(self, layer_idx: int, query: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
        """Attends with query [B, H, T, D] over what the plan selected; returns [B, T, H, E]."""
        ...

    def end_forward(self, foreseen: PageSelection | None) -> StepMetrics | None:
        """Ends the planned forward, committed or not; returns what it moved, if this storage moves anything.

        Args:
            foreseen: what the next forward will most likely read; None for everything, as far as anybody knows.
        """
        ...

    def copy_slots(self, copies: SlotCopy) -> None:
        """Copies the K/V of forked pages."""
        ...

    def read(
        self, layer_idx: int, pages: Sequence[Page], slots: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns copies of K [K, n, D] and V [K, n, E] at these slots of these pages, page after page."""
        ...

    def clear(self) -> None:
        """Gives all memory back."""
        ...

    def close(self) -> None:
        """Ends threads and files; the content is lost. Twice is harmless."""
        ...

    def clone(self, table: PageTable, policy: SelectionPolicy) -> Storage:
        """Returns an independent copy for copies of the table and of the policy."""
        ...


class ResidentStorage:
    """Everything stays in fast memory: slots of the table are slots of the pool."""

    def __init__(
        self, table: PageTable, pool: KVPool, backend: AttentionBackend, policy: SelectionPolicy
    ) -> None:
        self._table = table
        self.pool = pool
        self._backend = backend
        self._policy = policy
        self._plan: StepPlan | None = None
        self._forward: ForwardRequest | None = None
        self._chosen: list[StepPlan] = []

    @property
    def bytes_allocated(self) -> int:
        """Bytes of the pool."""
        return self.pool.bytes_allocated

    def read_by(self, policy: SelectionPolicy) -> None:
        """Lets another policy see what layers read."""
        self._policy = policy

    def relayout(self, relayout: Relayout) -> None:
        """Moves the pool."""
        self.pool.apply(relayout)

    def make_room(
        self, regions: Sequence[int], hold: Sequence[Page] = (), closing: Sequence[Page] = ()
    ) -> None:
        """Does nothing: the table makes room in the pool itself."""

    def settle(self, released: Sequence[int]) -> None:
        """Does nothing: the pool knows no pages."""

    def plan(self, forward: ForwardRequest) -> StepPlan:
        """Reads the slots of the table; see `Storage.plan`."""
        self._forward = forward
        self._plan = self._plan_of(forward, [None] * len(self._table.sequences))
        self._chosen = [self._plan_of(forward, rows) for rows in forward.selection.groups]
        return self._plan

    def write(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes into the pool."""
        assert self._plan is not None, "write outside a forward"
        self.pool.write(layer_idx, keys, values, self._plan)

    def attend(self, layer_idx: int, query: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
        """Attends over the pool; see `Storage.attend`."""
        assert self._plan is not None, "attend outside a forward"
        assert self._forward is not None
        group = self._forward.selection.group_of.get(layer_idx)
        if group is not None:
            plan = self._chosen[group]
            sources = self._sources(layer_idx, plan)
            watch = watcher(self._policy, layer_idx, spec)
            return attend_in_parts(self._backend, query, plan, spec, sources, watch)
        store = self.pool.store(layer_idx)
        watch_all(self._policy, layer_idx, query, store, self._plan, spec)
        return self._backend.attend(query, store, self._plan, spec)

    def _sources(self, layer_idx: int, plan: StepPlan) -> Iterator[Source]:
        """Yields what was chosen, then what the policy finds missing when that was read."""
        store = self.pool.store(layer_idx)
        for index, row in enumerate(plan.rows):
            if row.num_new:
                yield store, [(index, row)]
        for index, pages in enumerate(self._policy.missed(layer_idx)):
            if pages:
                yield store, [(index, self._past(index, pages))]

    def _past(self, index: int, pages: Sequence[Page]) -> RowPlan:
        assert self._forward is not None
        seq = self._table.sequences[index]
        tokens = key_tokens_of(pages) if self._forward.needs_tokens(index) else None
        sizes, starts = page_sizes(pages), page_starts(pages)
        where = RowPages(runs_of(pages), tokens, (), seq.length, sizes, starts)
        return row_plan(where, self._forward.requests[index], self._forward.device, is_past=True)

    def _plan_of(self, forward: ForwardRequest, chosen: Sequence[RowPagesChosen]) -> StepPlan:
        rows = []
        for index, pages in enumerate(chosen):
            seq, slots = self._table.sequences[index], forward.new_slots[index]
            if pages is None:
                rows.append(self._whole_row(forward, index, seq, slots))
                continue
            tokens = forward.key_tokens(index, pages, seq.num_committed)
            sizes, starts = page_sizes(pages), page_starts(pages)
            runs = runs_of(pages, seq.num_committed)
            rows.append(RowPages(runs, tokens, slots, seq.length, sizes, starts))
        requests, queries = forward.requests, forward.num_queries
        return build_plan(rows, requests, queries, forward.device, forward.bias)

    def _whole_row(
        self, forward: ForwardRequest, index: int, seq: SequencePages, slots: Sequence[int]
    ) -> RowPages:
        is_enough = forward.num_queries == 1 or end_in_order(seq.pages, seq.num_committed)
        key_tokens = None
        if forward.needs_tokens(index) or not is_enough:
            key_tokens = seq.key_tokens()
        sizes = page_sizes(seq.pages) if forward.selection.is_watched else ()
        return RowPages(seq.runs(), key_tokens, slots, seq.length, sizes)

    def end_forward(self, foreseen: PageSelection | None) -> StepMetrics | None:  # noqa: ARG002
        """Forgets the plan; nothing was moved."""
        self._plan = self._forward = None
        self._chosen = []
        return None

    def copy_slots(self, copies: SlotCopy) -> None:
        """Copies within the pool."""
        self.pool.copy_slots(copies)

    def read(  # the pool needs slots only
        self,
        layer_idx: int,
        pages: Sequence[Page],  # noqa: ARG002
        slots: Sequence[Sequence[int]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies out of the pool; see `Storage.read`."""
        return self.pool.read(layer_idx, [slot for own in slots for slot in own])

    def clear(self) -> None:
        """Gives the pool's memory back."""
        self.pool.clear()

    def close(self) -> None:
        """Does nothing: there are neither threads nor files."""

    def clone(self, table: PageTable, policy: SelectionPolicy) -> ResidentStorage:
        """Returns an independent copy for copies of the table and of the policy."""
        return ResidentStorage(table, self.pool.clone(), self._backend, policy)


def key_reader(of_layer: Sequence[Storage]) -> ReadKeys:
    """Returns what reads the keys of a layer from the storage that has it."""

    # no method of the cache: that would be a cycle, and a cache that nobody holds must end at once
    def read(layer_idx: int, pages: Sequence[Page], slots: Sequence[Sequence[int]]) -> torch.Tensor:
        return of_layer[layer_idx].read(layer_idx, pages, slots)[0]

    return read


def watcher(policy: SelectionPolicy, layer_idx: int, spec: LayerSpec) -> Watch | None:
    """Returns what tells a policy of a layer's reads; None where it does not care."""
    if not policy.watches(layer_idx):
        return None

    def watch(
        index: int,
        query: torch.Tensor,
        store: LayerStore,
        row: RowPlan,
        bias: torch.Tensor | None,
        page_lse: torch.Tensor | None,
    ) -> None:
        policy.saw(layer_idx, index, query, store, row, spec, bias, page_lse)

    return watch


def watch_all(
    policy: SelectionPolicy,
    layer_idx: int,
    query: torch.Tensor,
    store: LayerStore,
    plan: StepPlan,
    spec: LayerSpec,
) -> None:
    """Tells a policy of every row of a layer that reads everything from one place."""
    watch = watcher(policy, layer_idx, spec)
    if watch is None:
        return
    for index, row in enumerate(plan.rows):
        if row.num_new:
            bias = row_bias(plan, index, row, query.device)
            watch(index, row_query(query, index, row), store, row, bias, None)


def page_sizes(pages: Sequence[Page]) -> tuple[tuple[int, int], ...]:
    """Returns (page id, tokens) of each page."""
    return tuple((page.page_id, len(page)) for page in pages)


def page_starts(
    pages: Sequence[Page], shift: Callable[[Page], int] | None = None
) -> tuple[int, ...]:
    """Returns the first slot of each page, moved by its shift; nothing where a page lies in pieces."""
    starts = []
    for page in pages:
        runs = page.runs()
        if len(runs) != 1:
            return ()
        starts.append(runs[0][0] + (0 if shift is None else shift(page)))
    return tuple(starts)
