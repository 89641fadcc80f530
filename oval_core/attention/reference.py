"""The oracle backend: one mask, one softmax, float32, every KV head repeated. Slow and short on purpose."""

from __future__ import annotations

import torch

from oval_core.attention.base import RowBackend, allowed, read
from oval_core.attention.partial import Part
from oval_core.kv_pool import LayerStore
from oval_core.values import LayerSpec, RowPlan


class ReferenceBackend(RowBackend):
    """Materialises scores [H, N, L] in float32 and computes the textbook formula."""

    name = "reference"
    description = "float32 oracle, slow: for tests and doubts"

    def attend_parts(
        self,
        query: torch.Tensor,
        store: LayerStore,
        row: RowPlan,
        spec: LayerSpec,
        bias: torch.Tensor | None,
    ) -> list[Part]:
        """Attends over some keys; see `AttentionBackend.attend_parts`."""
        group = query.shape[0] // store.keys.shape[0]
        keys = read(store.keys, row.segments).float().repeat_interleave(group, 0)
        values = read(store.values, row.segments).float().repeat_interleave(group, 0)
        scores = torch.einsum("hnd,hld->hnl", query.float(), keys) * spec.scaling
        if spec.softcap is not None:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        if bias is not None:
            scores = scores + bias.float()
        else:
            scores = scores.masked_fill(~allowed(row, spec.window, query.device), float("-inf"))
        weights = torch.softmax(scores, -1).nan_to_num(0.0)
        out = torch.einsum("hnl,hle->hne", weights, values).to(query.dtype)
        return [(out, torch.logsumexp(scores, -1))]
