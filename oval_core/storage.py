"""Where the K and V of some layers are kept: one contract for memory that holds all and for memory that does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from oval_core.attention import AttentionBackend
from oval_core.kv_pool import KVPool
from oval_core.metrics import StepMetrics
from oval_core.page_layout import Relayout
from oval_core.page_table import PageTable, SlotCopy
from oval_core.pages import Page
from oval_core.plan import build_plan
from oval_core.values import LayerSpec, PageSelection, RowPages, RowRequest, StepPlan


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

    @property
    def needs_order(self) -> bool:
        """Whether some layer must know the token behind each key."""
        return self.has_windows or self.num_queries > 1 or self.bias is not None


class Storage(Protocol):
    """K and V of some layers of one cache, addressed by the pages and slots of its `PageTable`."""

    @property
    def bytes_allocated(self) -> int:
        """Bytes of fast memory set aside."""
        ...

    def relayout(self, relayout: Relayout) -> None:
        """Follows a new layout of the table's slots."""
        ...

    def make_room(self, regions: Sequence[int], hold: Sequence[Page] = ()) -> None:
        """Makes sure that new pages of these sizes, the open pages, and the pages to `hold` can be written."""
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

    def end_forward(self) -> StepMetrics | None:
        """Ends the planned forward, committed or not; returns what it moved, if this storage moves anything."""
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

    def clone(self, table: PageTable) -> Storage:
        """Returns an independent copy for a copy of the table."""
        ...


class ResidentStorage:
    """Everything stays in fast memory: slots of the table are slots of the pool."""

    def __init__(self, table: PageTable, pool: KVPool, backend: AttentionBackend) -> None:
        self._table = table
        self.pool = pool
        self._backend = backend
        self._plan: StepPlan | None = None

    @property
    def bytes_allocated(self) -> int:
        """Bytes of the pool."""
        return self.pool.bytes_allocated

    def relayout(self, relayout: Relayout) -> None:
        """Moves the pool."""
        self.pool.apply(relayout)

    def make_room(self, regions: Sequence[int], hold: Sequence[Page] = ()) -> None:
        """Does nothing: the table makes room in the pool itself."""

    def settle(self, released: Sequence[int]) -> None:
        """Does nothing: the pool knows no pages."""

    def plan(self, forward: ForwardRequest) -> StepPlan:
        """Reads the slots of the table; see `Storage.plan`."""
        assert all(pages is None for pages in forward.selection.pages), "no policy selects pages"
        rows = []
        for seq, request, slots in zip(
            self._table.sequences, forward.requests, forward.new_slots, strict=True
        ):
            ordered = forward.needs_order or request.hidden is not None
            key_tokens = seq.key_tokens() if ordered else None
            rows.append(RowPages(seq.runs(), key_tokens, slots, seq.length))
        self._plan = build_plan(
            rows, forward.requests, forward.num_queries, forward.device, forward.bias
        )
        return self._plan

    def write(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes into the pool."""
        assert self._plan is not None, "write outside a forward"
        self.pool.write(layer_idx, keys, values, self._plan)

    def attend(self, layer_idx: int, query: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
        """Attends over the pool; see `Storage.attend`."""
        assert self._plan is not None, "attend outside a forward"
        return self._backend.attend(query, self.pool.store(layer_idx), self._plan, spec)

    def end_forward(self) -> StepMetrics | None:
        """Forgets the plan; nothing was moved."""
        self._plan = None
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

    def clone(self, table: PageTable) -> ResidentStorage:
        """Returns an independent copy for a copy of the table."""
        return ResidentStorage(table, self.pool.clone(), self._backend)
