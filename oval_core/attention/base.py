"""What every attention backend offers, and how a row's keys and masks are read from a plan.

Shapes: B rows, T queries, N new tokens of a row (N <= T), H heads, K KV heads, G = H / K, D and E head dims,
L keys of a row. A plan's tensors lie on the device of the first layer; `.to` costs nothing there and lets a model be
spread over several devices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch

from oval_core.attention.partial import Part, merge
from oval_core.kv_pool import LayerStore
from oval_core.values import LayerSpec, RowPlan, Segment, StepPlan


class AttentionBackend(Protocol):
    """Computes attention of new tokens over the slots that a plan names."""

    name: str
    description: str

    def unavailable_reason(self) -> str | None:
        """Returns why this backend cannot run here, or None."""
        ...

    def attend(
        self, query: torch.Tensor, store: LayerStore, plan: StepPlan, spec: LayerSpec
    ) -> torch.Tensor:
        """Attends with query [B, H, T, D]; returns [B, T, H, E]. Outputs of padding are zero."""
        ...

    def attend_parts(
        self,
        query: torch.Tensor,
        store: LayerStore,
        row: RowPlan,
        spec: LayerSpec,
        bias: torch.Tensor | None,
    ) -> list[Part]:
        """Attends with the N new tokens of one row, query [H, N, D], over some of its keys.

        Returns:
            Outputs [H, N, E] and log-sum-exps [H, N], to be merged with those of the other keys.
        """
        ...

    def attend_pages(
        self, query: torch.Tensor, store: LayerStore, row: RowPlan, spec: LayerSpec
    ) -> tuple[Part, torch.Tensor] | None:
        """Attends with one query of a row, [H, 1, D], over `row.pages`, and measures what each page gets.

        Returns:
            The part, and the log-sum-exp [H, 1, P] of each page; None where this backend has no way of its own to it.
        """
        ...


class RowBackend(ABC):
    """Walks the rows of a batch; a backend says what one row does."""

    name: str
    description: str

    def unavailable_reason(self) -> str | None:
        """Returns None: plain torch runs everywhere."""
        return None

    def attend(
        self, query: torch.Tensor, store: LayerStore, plan: StepPlan, spec: LayerSpec
    ) -> torch.Tensor:
        """Attends row by row; see `AttentionBackend.attend`."""
        batch, heads, num_queries, _ = query.shape
        out = query.new_zeros(batch, num_queries, heads, store.values.shape[2])
        for index, row in enumerate(plan.rows):
            if row.num_new == 0:
                continue
            bias = row_bias(plan, index, row, query.device)
            put_row(
                out[index],
                row,
                self.attend_row(row_query(query, index, row), store, row, spec, bias),
            )
        return out

    def attend_row(
        self,
        query: torch.Tensor,
        store: LayerStore,
        row: RowPlan,
        spec: LayerSpec,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attends with the N new tokens of one row, query [H, N, D]; returns [H, N, E]."""
        return merge(self.attend_parts(query, store, row, spec, bias))

    def attend_pages(
        self,
        query: torch.Tensor,  # noqa: ARG002 - an `AttentionBackend`
        store: LayerStore,  # noqa: ARG002
        row: RowPlan,  # noqa: ARG002
        spec: LayerSpec,  # noqa: ARG002
    ) -> tuple[Part, torch.Tensor] | None:
        """Returns None: attention and measuring are two steps."""
        return None

    @abstractmethod
    def attend_parts(
        self,
        query: torch.Tensor,
        store: LayerStore,
        row: RowPlan,
        spec: LayerSpec,
        bias: torch.Tensor | None,
    ) -> list[Part]:
        """Attends over some keys of a row; see `AttentionBackend.attend_parts`."""


def row_query(query: torch.Tensor, index: int, row: RowPlan) -> torch.Tensor:
    """Returns the queries [H, N, D] of a row's new tokens out of [B, H, T, D]."""
    if row.query_places is None:
        return query[index]
    return query[index][:, row.query_places.to(query.device)]


def put_row(out: torch.Tensor, row: RowPlan, result: torch.Tensor) -> None:
    """Writes a row's result [H, N, E] to its places in out [T, H, E]."""
    result = result.transpose(0, 1)
    if row.query_places is None:
        out.copy_(result)
    else:
        out.index_copy_(0, row.query_places.to(out.device), result.to(out.dtype))


def row_bias(plan: StepPlan, index: int, row: RowPlan, device: torch.device) -> torch.Tensor | None:
    """Returns the caller's additive mask [H or 1, N, L] for the keys of `row`, in key order, or None."""
    if plan.bias is None:
        return None
    bias = plan.bias[index if plan.bias.shape[0] > 1 else 0].to(device)
    if row.query_places is not None:
        bias = bias[:, row.query_places.to(device)]
    return bias if row.key_tokens is None else bias[..., row.key_tokens.to(device)]


def read(tensor: torch.Tensor, segments: tuple[Segment, ...]) -> torch.Tensor:
    """Returns the keys or values [K, L, D] of some segments; no copy when it is one slice."""
    parts = [
        tensor[:, part]
        if isinstance(part, slice)
        else tensor.index_select(1, part.to(tensor.device))
        for part in segments
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def allowed(row: RowPlan, window: int | None, device: torch.device) -> torch.Tensor:
    """Returns which keys each new token may see, bool [N, L]: causal, by position or by the tree; within the window, not hidden."""
    if row.key_tokens is None:
        keys = torch.arange(row.length, device=device)
        end = row.length + (row.num_new if row.is_past else 0)
    else:
        keys, end = row.key_tokens.to(device), row.num_tokens
    last = torch.arange(end - row.num_new, end, device=device)
    if row.by_position:
        assert row.positions is not None, "positions decide"
        place = row.positions.to(device)
        seen = place[keys] <= place[last][:, None]
    else:
        seen = keys <= last[:, None]
    if row.tree is not None and not row.is_past:
        tree = row.tree.to(device)
        place = keys - (end - tree.shape[1])  # among the new tokens
        seen = (place < 0) | tree[:, place.clamp(min=0)]
    if window is not None:
        if row.positions is not None:
            keys, last = row.positions.to(device)[keys], row.positions.to(device)[last]
        seen &= keys > last[:, None] - window
    if row.hidden is not None:
        seen &= ~row.hidden.to(device)
    return seen


def within_window(row: RowPlan, window: int | None) -> RowPlan:
    """Leaves out the keys that lie before the window of every new token."""
    if window is None or row.is_past or not row.is_plain:
        return row
    if row.length <= window - 1 + row.num_new:
        return row
    length = window - 1 + row.num_new
    return replace(
        row, length=length, segments=split_segments(row.segments, row.length - length)[1]
    )


def split_segments(
    segments: tuple[Segment, ...], count: int
) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """Splits segments into the first `count` keys and the rest."""
    head: list[Segment] = []
    tail: list[Segment] = []
    for part in segments:
        size = segment_size(part)
        take = min(max(count, 0), size)
        count -= size
        if take:
            head.append(_cut(part, 0, take))
        if take < size:
            tail.append(_cut(part, take, size))
    return tuple(head), tuple(tail)


def segment_size(part: Segment) -> int:
    """Number of keys of a segment."""
    return part.stop - part.start if isinstance(part, slice) else int(part.shape[0])


def query_tiles(num_queries: int, num_heads: int, num_keys: int) -> Iterator[slice]:
    """Cuts queries into tiles whose scores stay below about 64 MB in float32, whatever the length."""
    size = max(1, (1 << 24) // max(1, num_heads * num_keys))
    for start in range(0, num_queries, size):
        yield slice(start, min(start + size, num_queries))


def _cut(part: Segment, start: int, end: int) -> Segment:
    if isinstance(part, slice):
        return slice(part.start + start, part.start + end)
    return part[start:end]
