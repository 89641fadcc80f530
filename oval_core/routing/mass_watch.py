"""Measures what share of attention each page gets while a forward runs: sums of exp(score) by page, layer after layer.

Only the last queries of a long forward are watched, but all of a token tree. Shapes: H query heads, K KV heads, W watched queries, L keys of a
source, P pages, G layer groups, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from oval_core.attention.base import allowed, read
from oval_core.kv_pool import LayerStore
from oval_core.pages import SequencePages
from oval_core.values import LayerSpec, RowPlan

WATCHED_QUERIES = 64
"""Queries of a long forward that are watched: its last ones (SnapKV's window, arXiv 2404.14469)."""


@dataclass(frozen=True, slots=True)
class SeenPages:
    """What one row's pages got in one layer: log of the sum of exp(score) by page, of one source.

    Attributes:
        page_ids: the pages.
        lse: [H, W, P] float32, -inf where a query may see nothing of a page.
    """

    page_ids: tuple[int, ...]
    lse: torch.Tensor


@dataclass(frozen=True, slots=True)
class SeenRow:
    """What one row's pages got in a whole forward.

    Attributes:
        page_ids: pages that some watched layer read.
        mass: [W, G, P] share of attention, mean over the layers of a group that read the page, and over heads.
        peak: [W, G, P] the largest of them.
        read: bool [G, P] whether a layer of the group read the page.
        queries: [Y, W, H, D] of the watched layers, in their order.
    """

    page_ids: tuple[int, ...]
    mass: torch.Tensor
    peak: torch.Tensor
    read: torch.Tensor
    queries: torch.Tensor


@dataclass(frozen=True, slots=True)
class Stayed:
    """Which new tokens of a row stay, once that is known.

    Attributes:
        num_new: tokens that the forward brought.
        places: of those that stay, among them.
        page_ids: the page of each of these.
    """

    num_new: int
    places: tuple[int, ...]
    page_ids: tuple[int, ...]

    def queries(self, num_watched: int) -> list[int]:
        """Returns which of the watched queries, the last ones of the forward, belong to tokens that stay."""
        unseen = self.num_new - num_watched
        return [place - unseen for place in self.places if place >= unseen]

    @property
    def names(self) -> dict[int, int]:
        """Page by the name of a tree's new token; see `_named_pages`."""
        return {-1 - place: i for place, i in zip(self.places, self.page_ids, strict=True)}


def stayed_of(seq: SequencePages, num_new: int, accepted: Sequence[int]) -> Stayed:
    """Returns what stayed of a forward that has just been committed."""
    first = seq.num_committed - len(accepted)
    page_of = {
        token: page.page_id
        for page in seq.pages
        if page.tokens[-1] >= first
        for token in page.tokens
    }
    ids = tuple(page_of[first + rank] for rank in range(len(accepted)))
    return Stayed(num_new, tuple(accepted), ids)


def watched(query: torch.Tensor, plan: RowPlan) -> torch.Tensor:
    """Returns those of a row's queries [H, N, D] that are watched."""
    return query[:, -WATCHED_QUERIES:] if plan.tree is None else query


class MassWatch:
    """What the watched layers of one forward read, row by row."""

    def __init__(self, group_of: Mapping[int, int]) -> None:
        self._group_of = group_of
        self._layer: int | None = None
        self._open: dict[int, list[SeenPages]] = {}  # of the running layer, by row
        self._closed: dict[int, list[tuple[int, SeenPages]]] = {}  # by row: (group, masses)
        self._queries: dict[int, list[torch.Tensor]] = {}

    @property
    def rows(self) -> list[int]:
        """Rows that were seen."""
        return list(self._queries)

    def saw(
        self,
        layer: int,
        row: int,
        query: torch.Tensor,
        store: LayerStore,
        plan: RowPlan,
        spec: LayerSpec,
        bias: torch.Tensor | None,
        page_lse: torch.Tensor | None = None,
    ) -> None:
        """Adds what a row, with query [H, N, D], read of one source; page_lse [H, W, P] if it was measured already."""
        if layer != self._layer:
            self.close_layer()
            self._layer = layer
        query = watched(query, plan)
        if row not in self._open:
            self._open[row] = []
            # a copy: a view would keep all queries of a long prompt, layer after layer
            self._queries.setdefault(row, []).append(query.transpose(0, 1).clone())
        if page_lse is not None:
            ids = tuple(page_id for page_id, _ in plan.pages)
            self._open[row].append(SeenPages(ids, page_lse))
        elif plan.length:
            self._open[row].append(_seen(query, store, plan, spec, bias))

    def seen(self, row: int) -> SeenPages:
        """Returns what a row read of the running layer up to now."""
        parts = self._open[row]
        ids = tuple(page_id for part in parts for page_id in part.page_ids)
        return SeenPages(ids, torch.cat([part.lse for part in parts], -1))

    def query(self, row: int) -> torch.Tensor:
        """Returns the watched queries [W, H, D] of the running layer."""
        return self._queries[row][-1]

    def close_layer(self) -> None:
        """Ends the running layer: sums become shares."""
        if self._layer is None:
            return
        group = self._group_of[self._layer]
        for row, parts in self._open.items():
            if parts:
                seen = self.seen(row)
                share = torch.softmax(seen.lse, -1).nan_to_num(0.0)
                self._closed.setdefault(row, []).append((group, SeenPages(seen.page_ids, share)))
        self._open, self._layer = {}, None

    def row(self, row: int, stayed: Stayed | None = None) -> SeenRow:
        """Returns what a row's pages got, if not from all new tokens; to be asked for after the last layer."""
        self.close_layer()
        layers = self._closed.get(row, [])
        queries = torch.stack(self._queries[row])
        kept = None if stayed is None else stayed.queries(queries.shape[1])
        names = {} if stayed is None else stayed.names
        seen_ids = (names.get(i, i) for _, part in layers for i in part.page_ids)
        ids = tuple(i for i in dict.fromkeys(seen_ids) if i >= 0)
        place = {page_id: i for i, page_id in enumerate(ids)}
        queries = queries if kept is None else queries[:, kept]
        groups = 1 + max(self._group_of.values())
        mass = torch.zeros(queries.shape[1], groups, len(ids))
        peak, num = torch.zeros_like(mass), torch.zeros(groups, len(ids))
        for (group, page_ids), shares in _by_pages(layers).items():
            share = torch.stack(shares).cpu()  # [layers, H, W, P]
            if kept is not None:
                page_ids, share = _renamed(page_ids, share[:, :, kept], names)
            index = torch.tensor([place[i] for i in page_ids])
            mass[:, group].index_add_(1, index, share.mean(1).sum(0))
            num[group].index_add_(0, index, torch.full((len(index),), float(len(shares))))
            best = torch.maximum(peak[:, group].index_select(1, index), share.amax((0, 1)))
            peak[:, group].index_copy_(1, index, best)
        return SeenRow(ids, mass / num.clamp(min=1), peak, num > 0, queries)


def _renamed(
    page_ids: Sequence[int], share: torch.Tensor, names: Mapping[int, int]
) -> tuple[tuple[int, ...], torch.Tensor]:
    """Adds what a tree's new tokens got, [..., P], to their pages; what the others got is dropped."""
    named = [names.get(i, i) for i in page_ids]
    ids = tuple(i for i in dict.fromkeys(named) if i >= 0)
    place = {page_id: i for i, page_id in enumerate(ids)}
    source = torch.tensor([i for i, page_id in enumerate(named) if page_id >= 0])
    target = torch.tensor([place[page_id] for page_id in named if page_id >= 0])
    out = share.new_zeros(*share.shape[:-1], len(ids))
    return ids, out.index_add_(-1, target, share.index_select(-1, source))


def _named_pages(plan: RowPlan) -> tuple[tuple[int, int], ...]:
    """Returns (page id, tokens) of the keys, but each new token of a tree for itself, named -1 - place.

    Its page is known only when it is known which of them stay.
    """
    if plan.tree is None or plan.is_past:
        return plan.pages
    pages, left = list(plan.pages), plan.num_new
    while left:
        page_id, size = pages.pop()
        if size > left:
            pages.append((page_id, size - left))
        left -= min(size, left)
    return (*pages, *((-1 - place, 1) for place in range(plan.num_new)))


def _by_pages(
    layers: Sequence[tuple[int, SeenPages]],
) -> dict[tuple[int, tuple[int, ...]], list[torch.Tensor]]:
    # layers of a group mostly read the same pages: they are added up together
    found: dict[tuple[int, tuple[int, ...]], list[torch.Tensor]] = {}
    for group, part in layers:
        found.setdefault((group, part.page_ids), []).append(part.lse)
    return found


def _seen(
    query: torch.Tensor,
    store: LayerStore,
    plan: RowPlan,
    spec: LayerSpec,
    bias: torch.Tensor | None,
) -> SeenPages:
    scores = masked_scores(query, store, plan, spec, bias)
    pages = _named_pages(plan)
    return SeenPages(tuple(i for i, _ in pages), _page_lse(scores, pages))


def masked_scores(
    query: torch.Tensor,
    store: LayerStore,
    plan: RowPlan,
    spec: LayerSpec,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Returns scores [H, W, L] of the last queries [H, W, D] of a row, float32.

    They are -inf where a key is not seen: causal order, the layer's window, what the plan hides; `bias`, if given, says
    all of that by itself.
    """
    heads, count, dim = query.shape
    keys = read(store.keys, plan.segments)
    kv_heads, length, _ = keys.shape
    grouped = (query * spec.scaling).reshape(kv_heads, -1, dim)
    scores = torch.bmm(grouped, keys.transpose(1, 2)).view(heads, count, length).float()
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if bias is not None:
        scores = scores + bias[:, -count:]
    elif count > 1 or not plan.is_plain or spec.window is not None:
        seen = allowed(_last_of(plan, count), spec.window, query.device)
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores


def _last_of(plan: RowPlan, count: int) -> RowPlan:
    """Returns the plan of the last `count` new tokens over the same keys."""
    if plan.is_past and plan.key_tokens is None:
        # such keys are counted back from the first new token, which is another one now
        tokens, total = torch.arange(plan.length), plan.length + plan.num_new
        return replace(plan, num_new=count, key_tokens=tokens, num_tokens=total)
    return replace(plan, num_new=count)


def _page_lse(scores: torch.Tensor, pages: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Returns the log-sum-exp [..., P] of scores [..., L] by page."""
    sizes = [size for _, size in pages]
    full = next((i for i, size in enumerate(sizes) if size != sizes[0]), len(sizes))
    if full >= len(sizes) - 1:  # equal pages and perhaps an open one at the end
        split = full * sizes[0]
        whole = scores[..., :split].reshape(*scores.shape[:-1], full, sizes[0])
        parts = [whole.logsumexp(-1)]
        if full < len(sizes):
            parts.append(scores[..., split:].logsumexp(-1, keepdim=True))
        return torch.cat(parts, -1)
    top = scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    page = torch.repeat_interleave(torch.tensor(sizes)).to(scores.device)
    sums = scores.new_zeros(*scores.shape[:-1], len(sizes))
    sums.index_add_(-1, page, (scores - top).exp())
    return sums.log() + top
