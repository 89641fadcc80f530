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
            bias = row_bias(plan, index, query.device)
            if row.query_places is None:
                out[index] = self.attend_row(query[index], store, row, spec, bias).transpose(0, 1)
            else:
                places = row.query_places.to(query.device)
                bias = None if bias is None else bias[:, places]
                part = self.attend_row(query[index][:, places], store, row, spec, bias)
                out[index].index_copy_(0, places, part.transpose(0, 1).to(out.dtype))
        return out

    @abstractmethod
    def attend_row(
        self,
        query: torch.Tensor,
        store: LayerStore,
        row: RowPlan,
        spec: LayerSpec,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attends with the N new tokens of one row, query [H, N, D]; returns [H, N, E]."""


def row_bias(plan: StepPlan, row: int, device: torch.device) -> torch.Tensor | None:
    """Returns the caller's additive mask [H or 1, T, L] of a row, in key order, or None."""
    if plan.bias is None:
        return None
    bias = plan.bias[row if plan.bias.shape[0] > 1 else 0].to(device)
    key_tokens = plan.rows[row].key_tokens
    return bias if key_tokens is None else bias[..., key_tokens.to(device)]


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
    """Returns which keys each new token may see, bool [N, L]: causal, within the window, not hidden."""
    last = torch.arange(row.length - row.num_new, row.length, device=device)
    if row.key_tokens is None:
        keys = torch.arange(row.length, device=device)
    else:
        keys = row.key_tokens.to(device)
    seen = keys <= last[:, None]
    if window is not None:
        if row.positions is not None:
            keys, last = row.positions.to(device)[keys], row.positions.to(device)[last]
        seen &= keys > last[:, None] - window
    if row.hidden is not None:
        seen &= ~row.hidden.to(device)
    return seen


def within_window(row: RowPlan, window: int | None) -> RowPlan:
    """Leaves out the keys that lie before the window of every new token."""
    if window is None or not row.is_plain or row.length <= window - 1 + row.num_new:
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
