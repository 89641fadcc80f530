"""Attention over texts with image pages, out of token order in the pool, equals plain causal attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from oval_core.attention import create_backend
from oval_core.config import OvalConfig
from oval_core.paged_cache import PagedCache
from oval_core.policy import FullPolicy
from oval_core.values import ImageSet, LayerSpec, RowRequest

HEADS, KV_HEADS, DIM = 4, 2, 8
WINDOWS = (None, 9)
TILES = ((0, 1, 4, 5), (2, 3, 6, 7), (8, 9), (10, 11))
"""A grid of 3 x 4 in tiles of 2 x 2."""

FORWARDS = [
    [RowRequest(30, images=(ImageSet(5, TILES), ImageSet(17, TILES))), RowRequest(30)],
    [RowRequest(1), RowRequest(1)],
    [RowRequest(14, torch.arange(6, 20), images=(ImageSet(0, TILES),)), RowRequest(20, images=(ImageSet(4, TILES),))],
    [RowRequest(3), RowRequest(3)],
]  # fmt: skip
"""A prompt, a token, a turn with images in both rows and padding in one, a few tokens."""


def dense(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Attends with the last N of L tokens, query [H, N, D]; returns [N, H, D]."""
    count, length = query.shape[1], keys.shape[1]
    last, every = torch.arange(length - count, length)[:, None], torch.arange(length)
    seen = every <= last
    if window is not None:
        seen &= every > last - window
    keys, values = (t.repeat_interleave(HEADS // KV_HEADS, 0) for t in (keys, values))
    scores = (query @ keys.transpose(1, 2)) * DIM**-0.5
    out = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values
    return out.transpose(0, 1)


@pytest.mark.parametrize("tiers", [None, {"fast_tokens": 1024}, {"fast_tokens": 112}])
@pytest.mark.parametrize("name", ["torch", "sdpa", "reference"])
def test_image_pages_read_as_plain_text_does(name: str, tiers: dict[str, int] | None) -> None:
    generator = torch.Generator().manual_seed(0)
    backend = create_backend(name, torch.device("cpu"), torch.float32)
    cache = PagedCache(OvalConfig(page_size=8, tiers=tiers), WINDOWS, FullPolicy(), backend)
    kept = [[torch.zeros(2, KV_HEADS, 0, DIM) for _ in range(2)] for _ in WINDOWS]
    seen = [False, False]
    for requests in FORWARDS:
        width = max(request.num_new for request in requests)
        plan = cache.begin(requests, width, torch.device("cpu"))
        seen = [had or bool(own.images) for had, own in zip(seen, requests, strict=True)]
        if tiers is None:
            wanted = [had and width > 1 for had in seen]
            assert [row.ordered is not None for row in plan.rows] == wanted
        for layer, window in enumerate(WINDOWS):
            keys, values = torch.randn(2, 2, KV_HEADS, width, DIM, generator=generator)
            query = torch.randn(2, HEADS, width, DIM, generator=generator)
            cache.write(layer, keys, values)
            got = cache.attend(layer, query, LayerSpec(DIM**-0.5, window))
            for row, request in enumerate(requests):
                places = request.query_places
                own = slice(None) if places is None else places
                new = torch.stack([keys[row][:, own], values[row][:, own]])
                kept[layer][row] = torch.cat([kept[layer][row], new], 2)
                want = dense(query[row][:, own], *kept[layer][row], window)
                torch.testing.assert_close(got[row][own], want, atol=1e-5, rtol=1e-5)
        cache.commit()
        for row in range(2):
            gathered = torch.stack(cache.gather(0, row))
            torch.testing.assert_close(gathered, kept[0][row])
    cache.close()


def test_keys_in_order_are_the_same_keys() -> None:
    backend = create_backend("torch", torch.device("cpu"), torch.float32)
    cache = PagedCache(OvalConfig(page_size=8), (None,), FullPolicy(), backend)
    (row,) = cache.begin([FORWARDS[0][0]], 30, torch.device("cpu")).rows
    assert row.key_tokens is not None
    assert not row.is_plain
    ordered = row.in_order()
    assert ordered.is_plain
    slots = torch.cat([torch.arange(9999)[part] for part in ordered.segments])
    assert slots.tolist() == cache.table.sequences[0].token_slots()
    assert replace(ordered, ordered=None).in_order().segments is ordered.segments
