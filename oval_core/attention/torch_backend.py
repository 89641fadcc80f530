"""The fast path on a CPU: the flash kernel on strided views of the pool, split over keys; else matrix products.

Shapes: B rows, T queries, H heads, K KV heads, G = H / K, L keys, P parts, N new tokens, D head dim.
"""

from __future__ import annotations

import torch

from oval_core.attention.base import (
    RowBackend,
    allowed,
    read,
    segment_size,
    split_segments,
    within_window,
)
from oval_core.attention.dense import dense_part
from oval_core.attention.partial import (
    Part,
    cpu_flash,
    has_cpu_flash,
    mix,
    num_parts,
)
from oval_core.kv_pool import LayerStore
from oval_core.values import LayerSpec, RowPlan, Segment, StepPlan

_MIN_PART = 1024
"""Keys of a part below which splitting costs more than an idle core (measured on 2 cores, 3 KV heads)."""


class TorchBackend(RowBackend):
    """Reads K and V where they lie: no copy, no repeated KV head, no T x T mask."""

    name = "torch"
    description = (
        "strided flash kernel on CPU, grouped matrix products elsewhere: the default on a CPU"
    )

    def attend(
        self, query: torch.Tensor, store: LayerStore, plan: StepPlan, spec: LayerSpec
    ) -> torch.Tensor:
        """Attends over all rows at once where they lie evenly, else row by row."""
        if plan.num_queries == 1 and plan.bias is None and _flashable(query, store, spec):
            lone = len(plan.rows) == 1 and plan.rows[0].is_plain
            if lone and plan.rows[0].num_new and len(plan.rows[0].segments) == 1:
                part = within_window(plan.rows[0], spec.window).segments[0]
                if isinstance(part, slice):
                    return self.decode(
                        query, store, part.start, 0, segment_size(part), spec.scaling
                    )
            elif plan.stride is not None:
                length = plan.rows[0].length
                first, stride = plan.stride
                skip = 0 if spec.window is None else max(0, length - spec.window)
                return self.decode(query, store, first + skip, stride, length - skip, spec.scaling)
        return super().attend(query, store, plan, spec)

    def decode(
        self,
        query: torch.Tensor,
        store: LayerStore,
        first: int,
        stride: int,
        length: int,
        scaling: float,
    ) -> torch.Tensor:
        """Attends with one query a row over `length` slots from first, first + stride, ...: [B, 1, H, D]."""
        return _decode(query, store, first, stride, length, scaling)

    def attend_parts(
        self,
        query: torch.Tensor,
        store: LayerStore,
        row: RowPlan,
        spec: LayerSpec,
        bias: torch.Tensor | None,
    ) -> list[Part]:
        """Attends over some keys; see `AttentionBackend.attend_parts`."""
        if bias is None:
            row = within_window(row.in_order(), spec.window)
        if _is_flash(query, store, row, spec, bias):
            return self._plain_parts(query, store, row, spec)
        keys, values = read(store.keys, row.segments), read(store.values, row.segments)
        seen = None
        causal = row.num_new > 1 and not row.is_past
        if bias is None and (causal or window_binds(row, spec) or not row.is_plain):
            seen = allowed(row, spec.window, query.device)
        return [dense_part(query, keys, values, spec, seen, bias)]

    def seen_part(
        self, query: torch.Tensor, store: LayerStore, part: Segment, scaling: float
    ) -> Part:
        """Attends with query [H, N, D] over one segment of keys, of which every query sees all."""
        # The G * N queries of a KV head are one block: keys are read once.
        heads, count, dim = query.shape
        block = query.reshape(store.keys.shape[0], 1, -1, dim)
        keys, values = read(store.keys, (part,))[:, None], read(store.values, (part,))[:, None]
        out, lse = cpu_flash(block, keys, values, scaling, False)
        return out.reshape(heads, count, dim), lse.reshape(heads, count)

    def _plain_parts(
        self, query: torch.Tensor, store: LayerStore, row: RowPlan, spec: LayerSpec
    ) -> list[Part]:
        """New tokens [H, N, D] over old keys (all seen) and each other (causal, or by a tree): parts [H, N, D]."""
        heads, count, dim = query.shape
        num_last = 0 if row.is_past or count == 1 else count
        old, new = split_segments(row.segments, row.length - num_last)
        results = [self.seen_part(query, store, part, spec.scaling) for part in old]
        if num_last and row.tree is not None:
            keys, values = read(store.keys, new), read(store.values, new)
            seen = row.tree.to(query.device)
            results.append(dense_part(query, keys, values, spec, seen))
        elif num_last:
            # [K, L, D] -> [K, G, L, D] without a copy: the group dimension has stride 0
            kv_heads = store.keys.shape[0]
            keys = read(store.keys, new)[:, None].expand(-1, heads // kv_heads, -1, -1)
            values = read(store.values, new)[:, None].expand(-1, heads // kv_heads, -1, -1)
            grouped = query.reshape(kv_heads, heads // kv_heads, count, dim)
            out, lse = cpu_flash(grouped, keys, values, spec.scaling, True)
            results.append((out.reshape(heads, count, dim), lse.reshape(heads, count)))
        return results


def _is_flash(
    query: torch.Tensor,
    store: LayerStore,
    row: RowPlan,
    spec: LayerSpec,
    bias: torch.Tensor | None,
) -> bool:
    plain = bias is None and row.has_plain_past and not window_binds(row, spec)
    return plain and _flashable(query, store, spec)


def window_binds(row: RowPlan, spec: LayerSpec) -> bool:
    """Whether some query of the row does not see all older keys because of the layer's window."""
    return spec.window is not None and row.length > spec.window


def _flashable(query: torch.Tensor, store: LayerStore, spec: LayerSpec) -> bool:
    return (
        query.device.type == "cpu"
        and spec.softcap is None
        and store.keys.shape[2] == store.values.shape[2]
        and has_cpu_flash()
    )


def _decode(
    query: torch.Tensor, store: LayerStore, first: int, stride: int, length: int, scaling: float
) -> torch.Tensor:
    """One query a row over equally long runs that start at first, first + stride, ...: [B, 1, H, D].

    The kernel shares (batch, head) pairs out among cores. Few KV heads leave cores idle, so the keys are then
    cut into P equal parts, each taken for a head of its own, and merged by log-sum-exp.
    """
    batch, heads, _, dim = query.shape
    kv_heads, slots, _ = store.keys.shape
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, dim)
    parts = num_parts(batch * kv_heads, length, _MIN_PART)

    def view(tensor: torch.Tensor, start: int, count: int, cuts: int) -> torch.Tensor:
        # [B, K, P, count, D] over the pool [K, S, D]
        return tensor.as_strided(
            (batch, kv_heads, cuts, count, dim),
            (stride * dim, slots * dim, count * dim, dim, 1),
            tensor.storage_offset() + (first + start) * dim,
        )

    def flash(start: int, count: int, cuts: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = view(store.keys, start, count, cuts), view(store.values, start, count, cuts)
        q = grouped[row, :, None].expand(-1, cuts, -1, -1)
        return cpu_flash(q, keys[row], values[row], scaling, False)  # [K, P, G, D], [K, P, G]

    if parts == 1:
        keys, values = view(store.keys, 0, length, 1), view(store.values, 0, length, 1)
        out, _ = cpu_flash(grouped, keys[:, :, 0], values[:, :, 0], scaling, False)
        return out.reshape(batch, 1, heads, dim)
    size = length // parts
    rest = length - size * parts
    rows = []
    for row in range(batch):
        results = [flash(0, size, parts, row)]
        if rest:
            results.append(flash(size * parts, rest, 1, row))
        outs = torch.cat([out for out, _ in results], 1).float()
        rows.append(mix(outs, torch.cat([lse for _, lse in results], 1), 1))
    return torch.stack(rows).to(query.dtype).view(batch, 1, heads, dim)
