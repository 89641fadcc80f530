"""Attention by matrix products over grouped heads: no KV head is repeated in memory.

Shapes: H heads, K KV heads, G = H / K, N queries, L keys, D and E head dims.
"""

from __future__ import annotations

import torch

from oval_core.attention.base import query_tiles
from oval_core.attention.partial import Part
from oval_core.values import LayerSpec


def dense_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spec: LayerSpec,
    seen: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the output [H, N, E] alone; see `dense_part`."""
    return dense_part(query, keys, values, spec, seen, bias)[0]


def dense_part(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spec: LayerSpec,
    seen: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> Part:
    """Attends with query [H, N, D] over keys [K, L, D] and values [K, L, E].

    Scores are products in the dtype of the cache, the softmax is float32, as in Hugging Face's `eager`.

    Args:
        query: new tokens of one row.
        keys: keys of the row.
        values: values of the row.
        spec: scaling and soft cap; the window must already be in `seen`.
        seen: bool [N, L] which keys a query may see; None for all.
        bias: additive mask [H or 1, N, L]; None for none.
    Returns:
        Output [H, N, E] and log-sum-exp [H, N].
    """
    heads, count, dim = query.shape
    kv_heads, length, _ = keys.shape
    group = heads // kv_heads
    grouped = query.reshape(kv_heads, group, count, dim)
    out = query.new_empty(kv_heads, group, count, values.shape[2])
    lse = query.new_empty(kv_heads, group, count, dtype=torch.float32)
    for tile in query_tiles(count, heads, length):
        size = tile.stop - tile.start
        part = (grouped[:, :, tile] * spec.scaling).reshape(kv_heads, group * size, dim)
        scores = torch.bmm(part, keys.transpose(1, 2)).view(kv_heads, group, size, length)
        if spec.softcap is not None:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        if bias is not None:
            shaped = bias[:, tile]
            shaped = shaped[None] if bias.shape[0] == 1 else shaped.view_as(scores)
            scores = scores + shaped
        if seen is not None:
            scores = scores.masked_fill(~seen[tile], float("-inf"))
        lse[:, :, tile] = torch.logsumexp(scores.float(), -1)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype)
        if seen is not None or bias is not None:
            weights = weights.nan_to_num(0.0)  # a query that may see nothing gets zeros
        mixed = torch.bmm(weights.view(kv_heads, group * size, length), values)
        out[:, :, tile] = mixed.view(kv_heads, group, size, -1)
    return out.view(heads, count, -1), lse.view(heads, count)
