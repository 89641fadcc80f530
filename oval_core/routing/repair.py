"""Estimates what a selection missed, given a layer's true query, and which pages would make it good.

Shapes: H query heads, K KV heads, W queries, R pages that were read, P pages with a summary, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oval_core.page_summary import ReadKeys
from oval_core.pages import Page
from oval_core.values import LayerSpec


def cover(
    read_lse: torch.Tensor, estimates: torch.Tensor, unread: torch.Tensor, coverage: float
) -> torch.Tensor:
    """Returns the fewest unread pages, likeliest first, with which the estimated mass reaches `coverage`; bool [P].

    Args:
        read_lse: [H, W, R] log of the sum of exp(score) of each page that was read, exact.
        estimates: [H, W, P] the same for pages with a summary, estimated.
        unread: bool [P] which of these were not read.
        coverage: share of the mass, mean over heads and the worst of the queries; 1 reads all.
    """
    if coverage >= 1.0 or not bool(unread.any()):
        return unread.clone()
    read = read_lse.logsumexp(-1, keepdim=True)  # [H, W, 1]
    missing = estimates.masked_fill(~unread, float("-inf"))
    shares = torch.softmax(torch.cat([read, missing], -1), -1)[..., 1:].mean(0)  # [W, P]
    ranked = shares.amax(0).argsort(descending=True, stable=True)
    left = shares.sum(-1, keepdim=True) - shares[:, ranked].cumsum(
        -1
    )  # [W, P] after the first 1..P
    wanted = left > 1.0 - coverage  # still too much after this one: the next is needed too
    needed = torch.zeros_like(unread)
    start = bool((shares.sum(-1) > 1.0 - coverage).any())
    count = int(wanted.any(0).sum()) + 1 if start else 0
    needed[ranked[:count]] = True
    return needed & unread


def missing_share_of_pages(
    read_lse: torch.Tensor,
    query: torch.Tensor,
    unread: Sequence[Page],
    also_read: Sequence[Page],
    layer: int,
    read_keys: ReadKeys,
    spec: LayerSpec,
) -> float:
    """Returns `missing_share` of pages whose keys `read_keys` brings."""
    groups = [[read_keys(layer, [p], [p.slots]) for p in pages] for pages in (unread, also_read)]
    return missing_share(read_lse, query, groups[0], spec, groups[1])


def missing_share(
    read_lse: torch.Tensor,
    query: torch.Tensor,
    unread: Sequence[torch.Tensor],
    spec: LayerSpec,
    also_read: Sequence[torch.Tensor] = (),
) -> float:
    """Returns the share of the true attention mass that pages which were not read hold, mean over heads and queries.

    Args:
        read_lse: [H, W, R] as in `cover`.
        query: [W, H, D] of the layer.
        unread: keys [K, n, D] of each page.
        spec: scaling and soft cap of the layer.
        also_read: keys of pages that are read besides those of `read_lse`.
    """
    if not unread:
        return 0.0
    known = read_lse.logsumexp(-1)
    if also_read:
        known = torch.logaddexp(known, _log_mass(query, also_read, spec))
    return float(torch.sigmoid(_log_mass(query, unread, spec) - known).mean())


def _log_mass(query: torch.Tensor, pages: Sequence[torch.Tensor], spec: LayerSpec) -> torch.Tensor:
    """Returns [H, W]: log of the sum of exp(score) over all keys of some pages."""
    keys = torch.cat(list(pages), 1)
    num, heads, dim = query.shape
    grouped = (query.transpose(0, 1) * spec.scaling).reshape(keys.shape[0], -1, dim)
    scores = torch.bmm(grouped, keys.transpose(1, 2).to(grouped.device)).float()
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    return scores.logsumexp(-1).view(heads, num)
