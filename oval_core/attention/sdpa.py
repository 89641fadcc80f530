"""Attention by torch's `scaled_dot_product_attention`: whatever kernel torch finds on the device."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from oval_core.attention.base import RowBackend, allowed, read, within_window
from oval_core.attention.dense import dense_attention, dense_part
from oval_core.attention.partial import Part
from oval_core.kv_pool import LayerStore
from oval_core.values import LayerSpec, RowPlan


class SdpaBackend(RowBackend):
    """One fused call a row. What SDPA cannot do, or only by a whole score matrix, goes through matrix products:
    soft caps, and values of another head dim than keys."""

    name = "sdpa"
    description = "torch SDPA a row: the default on CUDA and MPS"

    def attend_row(
        self,
        query: torch.Tensor,
        store: LayerStore,
        row: RowPlan,
        spec: LayerSpec,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attends with one row; see `RowBackend.attend_row`."""
        if bias is None:
            row = within_window(row.in_order(), spec.window)
        keys, values = read(store.keys, row.segments), read(store.values, row.segments)
        if spec.softcap is not None or keys.shape[2] != values.shape[2]:
            seen = allowed(row, spec.window, query.device) if bias is None else None
            return dense_attention(query, keys, values, spec, seen, bias)
        mask = _mask(row, spec, query.device) if bias is None else None
        causal = bias is None and mask is None and row.num_new > 1
        out = F.scaled_dot_product_attention(
            query[None],
            keys[None],
            values[None],
            attn_mask=mask if bias is None else bias.to(query.dtype),
            is_causal=causal,
            scale=spec.scaling,
            enable_gqa=query.shape[0] != keys.shape[0],
        )
        return out[0]

    def attend_parts(
        self,
        query: torch.Tensor,
        store: LayerStore,
        row: RowPlan,
        spec: LayerSpec,
        bias: torch.Tensor | None,
    ) -> list[Part]:
        """Attends over some keys; see `AttentionBackend.attend_parts`. SDPA keeps its log-sum-exp to itself."""
        keys, values = read(store.keys, row.segments), read(store.values, row.segments)
        seen = None
        sees_all = row.is_plain and spec.window is None and (row.is_past or row.num_new == 1)
        if bias is None and not sees_all:
            seen = allowed(row, spec.window, query.device)
        return [dense_part(query, keys, values, spec, seen, bias)]


def _mask(row: RowPlan, spec: LayerSpec, device: torch.device) -> torch.Tensor | None:
    window_binds = spec.window is not None and row.length > spec.window
    if row.is_plain and not window_binds and row.num_new in (1, row.length):
        return None  # one query sees all keys; a first prefill is plainly causal
    return allowed(row, spec.window, device)
