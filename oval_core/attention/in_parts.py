"""Attention of a batch over keys that come from several places, one after the other: exact, by log-sum-exp.

Shapes: B rows, T queries, N new tokens of a row, H heads, E head dim of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from oval_core.attention.base import AttentionBackend, put_row, read, row_bias, row_query
from oval_core.attention.partial import Part, merge, merge_parts
from oval_core.kv_pool import LayerStore
from oval_core.values import LayerSpec, RowPlan, StepPlan

Source = tuple[LayerStore, Sequence[tuple[int, RowPlan]]]
"""Keys in one place and, for each row that reads of them, (row, which)."""

Watch = Callable[
    [int, torch.Tensor, LayerStore, RowPlan, torch.Tensor | None, torch.Tensor | None], None
]
"""Told of every (row, its queries [H, N, D], keys in one place, which of them, additive mask, what each page got if that is
known) that is attended."""

_MAX_PARTS = 8
"""Parts of a row that are held before they are merged."""

_MAX_HELD = 1 << 19
"""Numbers in the outputs that are held: the parts of a long prefill must not outweigh the pages."""


def attend_in_parts(
    backend: AttentionBackend,
    query: torch.Tensor,
    plan: StepPlan,
    spec: LayerSpec,
    sources: Iterable[Source],
    watch: Watch | None = None,
) -> torch.Tensor:
    """Attends with query [B, H, T, D] over the keys of all sources; returns [B, T, H, E].

    A source is done with before the next is asked for, so sources may share memory, and what is asked for may depend
    on what `watch` was told.
    """
    results: list[list[Part]] = [[] for _ in plan.rows]
    out: torch.Tensor | None = None
    for store, readers in sources:
        if out is None:
            batch, heads, num_queries, _ = query.shape
            out = query.new_zeros(batch, num_queries, heads, store.values.shape[2])
        for index, row in readers:
            if row.num_new == 0 or row.length == 0:
                continue
            bias = row_bias(plan, index, row, query.device)
            asked = row_query(query, index, row)
            own = _attend_one(backend, asked, store, index, row, spec, bias, watch)
            parts = results[index] + own
            results[index] = [merge_parts(parts)] if len(parts) >= _max_parts(parts[0]) else parts
    assert out is not None, "no source"
    for index, parts in enumerate(results):
        if parts:
            put_row(out[index], plan.rows[index], merge(parts))
    return out


def _attend_one(
    backend: AttentionBackend,
    query: torch.Tensor,
    store: LayerStore,
    index: int,
    row: RowPlan,
    spec: LayerSpec,
    bias: torch.Tensor | None,
    watch: Watch | None,
) -> list[Part]:
    """Returns the parts [H, N, E] of one row over one source, and tells the watch."""
    if watch is None:
        return backend.attend_parts(query, store, row, spec, bias)
    measured = None if bias is not None else backend.attend_pages(query, store, row, spec)
    if measured is not None:
        watch(index, query, store, row, None, measured[1])
        return [measured[0]]
    store, row = gathered(store, row)
    watch(index, query, store, row, bias, None)
    return backend.attend_parts(query, store, row, spec, bias)


def gathered(store: LayerStore, row: RowPlan) -> tuple[LayerStore, RowPlan]:
    """Returns a row's keys side by side, and the plan over them: gathered once for whoever reads them."""
    if len(row.segments) == 1 and isinstance(row.segments[0], slice):
        return store, row
    keys, values = read(store.keys, row.segments), read(store.values, row.segments)
    return LayerStore(keys, values), replace(row, segments=(slice(0, row.length),))


def _max_parts(part: Part) -> int:
    return max(2, min(_MAX_PARTS, _MAX_HELD // max(1, part[0].numel())))
