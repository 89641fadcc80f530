"""Attention of a batch over keys that come from several places, one after the other: exact, by log-sum-exp.

Shapes: B rows, T queries, N new tokens of a row, H heads, E head dim of values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from oval_core.attention.base import AttentionBackend, put_row, row_bias, row_query
from oval_core.attention.partial import Part, merge, merge_parts
from oval_core.kv_pool import LayerStore
from oval_core.values import LayerSpec, RowPlan, StepPlan

Source = tuple[LayerStore, Sequence[tuple[int, RowPlan]]]
"""Keys in one place and, for each row that reads of them, (row, which)."""

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
) -> torch.Tensor:
    """Attends with query [B, H, T, D] over the keys of all sources; returns [B, T, H, E].

    A source is done with before the next is asked for, so sources may share memory.
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
            parts = results[index] + backend.attend_parts(asked, store, row, spec, bias)
            results[index] = [merge_parts(parts)] if len(parts) >= _max_parts(parts[0]) else parts
    assert out is not None, "no source"
    for index, parts in enumerate(results):
        if parts:
            put_row(out[index], plan.rows[index], merge(parts))
    return out


def _max_parts(part: Part) -> int:
    return max(2, min(_MAX_PARTS, _MAX_HELD // max(1, part[0].numel())))
