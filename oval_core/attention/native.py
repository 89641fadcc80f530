"""The fastest path on a CPU: bf16 decode by compiled kernels; everything else as the torch backend does it."""

from __future__ import annotations

import torch

from oval_core.attention.base import read
from oval_core.attention.partial import Part
from oval_core.attention.torch_backend import TorchBackend
from oval_core.kv_pool import LayerStore
from oval_core.native import load_kernels, unavailable_reason
from oval_core.values import LayerSpec, RowPlan, Segment


class NativeBackend(TorchBackend):
    """One query a row in bf16 goes through C: keys and values are read once, sums are float32.

    Prefill, float32, soft caps and rows in many pieces go the torch backend's way.
    """

    name = "native"
    description = "C kernels for bf16 decode, torch for the rest: the default in bf16 on a CPU"

    def unavailable_reason(self) -> str | None:
        """Returns why the kernels cannot be compiled here, or None."""
        return unavailable_reason()

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
