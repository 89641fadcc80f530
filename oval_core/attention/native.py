"""The fastest path on a CPU: bf16 decode by compiled kernels; everything else as the torch backend does it."""

from __future__ import annotations

import torch

from oval_core.attention.base import read
from oval_core.attention.partial import Part
from oval_core.attention.torch_backend import TorchBackend, window_binds
from oval_core.kv_pool import LayerStore
from oval_core.native import load_kernels, unavailable_reason
from oval_core.native.tree import MOST_NEW
from oval_core.values import LayerSpec, RowPlan, Segment, StepPlan


class NativeBackend(TorchBackend):
    """One query a row in bf16 goes through C, and a few (a tree, a chain): keys are read once, sums are float32.

    Prefill, float32, soft caps, windows that bind and hidden keys go the torch backend's way; so do trees and chains on
    processors where that is faster.
    """

    name = "native"
    description = "C kernels for bf16 decode and token trees, torch for the rest: the default in bf16 on a CPU"

    def unavailable_reason(self) -> str | None:
        """Returns why the kernels cannot be compiled here, or None."""
        return unavailable_reason()

    def attend(
        self, query: torch.Tensor, store: LayerStore, plan: StepPlan, spec: LayerSpec
    ) -> torch.Tensor:
        """Attends over all rows; a few queries of a lone row are written where they belong at once."""
        row = plan.rows[0]
        lone = len(plan.rows) == 1 and row.num_new == plan.num_queries
        few = _attend_few(query[0], store, row, spec) if lone and plan.bias is None else None
        return super().attend(query, store, plan, spec) if few is None else few[None]

    def attend_row(
        self,
        query: torch.Tensor,
        store: LayerStore,
        row: RowPlan,
        spec: LayerSpec,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attends with the new tokens of one row; see `RowBackend.attend_row`."""
        few = _attend_few(query, store, row, spec) if bias is None else None
        if few is None:
            return super().attend_row(query, store, row, spec, bias)
        return few.transpose(0, 1)

    def decode(
        self,
        query: torch.Tensor,
        store: LayerStore,
        first: int,
        stride: int,
        length: int,
        scaling: float,
    ) -> torch.Tensor:
        """Attends with one query a row; see `TorchBackend.decode`."""
        if query.dtype != torch.bfloat16:
            return super().decode(query, store, first, stride, length, scaling)
        kernels = load_kernels(query.shape[3], query.shape[1] // store.keys.shape[0])
        return kernels.decode(query, store.keys, store.values, first, stride, length, scaling)

    def seen_part(
        self, query: torch.Tensor, store: LayerStore, part: Segment, scaling: float
    ) -> Part:
        """Attends over keys that all queries see; see `TorchBackend.seen_part`."""
        if query.dtype != torch.bfloat16 or query.shape[1] != 1:
            return super().seen_part(query, store, part, scaling)
        kernels = load_kernels(query.shape[2], query.shape[0] // store.keys.shape[0])
        keys, values = read(store.keys, (part,)), read(store.values, (part,))
        return kernels.decode_part(query, keys, values, scaling)

    def attend_pages(
        self, query: torch.Tensor, store: LayerStore, row: RowPlan, spec: LayerSpec
    ) -> tuple[Part, torch.Tensor] | None:
        """Attends over pages where they lie, and measures them on the way; see `AttentionBackend.attend_pages`."""
        if row.page_slots is None or not row.is_plain or query.shape[1] != 1:
            return None
        if query.dtype != torch.bfloat16 or spec.window is not None or spec.softcap is not None:
            return None
        if store.keys.shape != store.values.shape or not store.keys.is_contiguous():
            return None
        kernels = load_kernels(query.shape[2], query.shape[0] // store.keys.shape[0])
        starts, counts = row.page_slots
        return kernels.decode_pages(query, store.keys, store.values, starts, counts, spec.scaling)


def _is_few(query: torch.Tensor, store: LayerStore, row: RowPlan, spec: LayerSpec) -> bool:
    """Whether the kernel for a few new tokens [H, N, D] computes what is asked for."""
    keys, values, count = store.keys, store.values, row.num_new
    return (
        count <= MOST_NEW
        and (count > 1 or len(row.segments) > 1)  # `decode` is the way of one token over one run
        and row.has_plain_past
        and not row.is_past
        and (row.tree is None or row.tree.shape == (count, count))
        and spec.softcap is None
        and spec.scaling > 0
        and not window_binds(row, spec)
        and query.dtype is keys.dtype is values.dtype is torch.bfloat16
        and query.is_cpu
        and keys.is_cpu
        and keys.shape == values.shape
        and keys.is_contiguous()
        and values.is_contiguous()
        and not (torch.is_grad_enabled() and query.requires_grad)
    )


def _attend_few(
    query: torch.Tensor, store: LayerStore, row: RowPlan, spec: LayerSpec
) -> torch.Tensor | None:
    """Attends with query [H, N, D] over all keys of a row; returns [N, H, D], None where torch's way is to be taken."""
    if not _is_few(query, store, row, spec):
        return None
    tree = load_kernels(query.shape[2], query.shape[0] // store.keys.shape[0]).tree
    if row.num_new not in tree.counts:
        return None
    return tree(query, store.keys, store.values, row.segments, row.tree, spec.scaling)
