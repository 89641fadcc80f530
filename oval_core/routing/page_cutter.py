"""Cuts the text pages of a running cache by a sizing method: those of a long forward anew, and the open page early.

Shapes: T tokens of some pages, C hidden size, K KV heads, Y layers that are looked at, D head dim.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from oval_core.config import MAX_PAGE_SIZE, OvalConfig
from oval_core.kv_pool import KVPool
from oval_core.page_summary import ReadKeys
from oval_core.page_table import PageTable
from oval_core.pages import Page, SequencePages, key_tokens_of
from oval_core.repaging import Repaged, at_home
from oval_core.routing.layer_groups import layer_groups
from oval_core.routing.page_sizer import DynamicPageSizer
from oval_core.routing.sizing import (
    Evidence,
    FixedSizing,
    Gauge,
    PageSizing,
    create_sizing,
)
from oval_core.routing.token_watch import TokenWatch

if TYPE_CHECKING:
    from oval_core.tiers.residency import Residency

_EVERY = 4
"""Routed layers from one whose keys and attention are looked at to the next."""

_GAUGE_TOKENS = 256
"""Tokens that are enough for a gauge in place of an earlier one."""


@dataclass(frozen=True, slots=True)
class _Row:
    """What is known of one sequence: a gauge, the tokens it was taken from, and what all got, float32 [T] each."""

    gauge: Gauge | None
    num_gauged: int
    mass: torch.Tensor
    queries: torch.Tensor

    @classmethod
    def empty(cls) -> _Row:
        return cls(None, 0, torch.zeros(0), torch.zeros(0))

    def resized(self, length: int) -> _Row:
        """Returns the row with so many tokens; new ones got nothing yet."""
        grown = max(0, length - len(self.mass))
        mass, queries = (F.pad(t, (0, grown))[:length] for t in (self.mass, self.queries))
        return replace(self, mass=mass, queries=queries)


class PageCutter:
    """Follows the forwards of one cache: `collect` and `follow` as each commits, `truncate`, `reorder`, `reset` with the
    cache's own."""

    def __init__(
        self, sizing: PageSizing, layers: Sequence[int], page_size: int, max_queries: int
    ) -> None:
        """Makes the cutter of an empty cache.

        Args:
            sizing: where pages end.
            layers: routed layers, of which every fourth is looked at.
            page_size: tokens of a page of a sequence that never had a long forward.
            max_queries: forwards with more new tokens a row are long.
        """
        self._sizing, self._page_size, self._max_queries = sizing, page_size, max_queries
        self._layers = list(layers)[::_EVERY]
        self._rows: list[_Row] = []
        self.tokens = TokenWatch(self._layers) if "attention" in sizing.needs else None
        """Must be told what layers read, if it is there."""

    @property
    def tracks_hidden(self) -> bool:
        """Whether the pool must keep the last hidden states."""
        return "hidden" in self._sizing.needs

    def bind(self, table: PageTable, pool: KVPool, read_keys: ReadKeys) -> None:
        """Is given what it cuts and reads, before anything else."""
        self._table, self._pool, self._read_keys = table, pool, read_keys

    def collect(
        self, num_new: Sequence[int], accepted: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Takes what tokens got in a forward that is about to be committed.

        Args:
            num_new: tokens that it brought, by row.
            accepted: places of those that stay, by row; None for all.
        """
        for row, count in enumerate(num_new):
            if len(self._rows) <= row:
                self._rows.append(_Row.empty())
            if count:
                self._note(row, count, None if accepted is None else accepted[row])

    def follow(
        self, num_new: Sequence[int], residency: Residency | None
    ) -> dict[int, list[Repaged]]:
        """Cuts pages after a forward whose `num_new[row]` tokens have just been committed.

        Args:
            num_new: by row.
            residency: places of pages in fast memory, which follow; None where all have one.
        Returns:
            What became what, by row.
        """
        done: dict[int, list[Repaged]] = {}
        for row, count in enumerate(num_new):
            if not count:
                continue
            pages = _pages_from(self._table.sequences[row], count)
            if count > self._max_queries:
                parts = self._cut(row, pages, residency)
                if parts:
                    done[row] = parts
            self._seal(row, residency)
        self.abort()
        return done

    def abort(self) -> None:
        """Forgets what was seen of a running forward."""
        if self.tokens is not None:
            self.tokens.clear()

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forgets what tokens got that are dropped."""
        self._rows = [
            row.resized(min(length, len(row.mass)))
            for row, length in zip(self._rows, lengths, strict=False)
        ]

    def reorder(self, rows: Sequence[int]) -> None:
        """Makes row i what row rows[i] was."""
        self._rows = [self._rows[row] if row < len(self._rows) else _Row.empty() for row in rows]

    def reset(self) -> None:
        """Forgets every row."""
        self._rows = []
        self.abort()

    def clone(self) -> PageCutter:
        """Returns an independent copy, to be bound to a copy of the cache."""
        twin = copy.copy(self)
        twin._rows = list(self._rows)
        twin.tokens = None if self.tokens is None else TokenWatch(self._layers)
        return twin

    def _note(self, row: int, num_new: int, accepted: Sequence[int] | None) -> None:
        got = None if self.tokens is None else self.tokens.take(row, num_new, accepted)
        if got is None:
            return
        seq = self._table.sequences[row]
        first = seq.num_committed
        tokens = key_tokens_of(_pages_from(seq, num_new), first)
        assert len(tokens) == len(got.mass), "the pages that hold the new tokens are others"
        stays = range(num_new) if accepted is None else accepted
        index = {first + place: first + rank for rank, place in enumerate(stays)}
        kept = [i for i, token in enumerate(tokens) if token < first or token in index]
        at = torch.tensor([index.get(tokens[i], tokens[i]) for i in kept], dtype=torch.long)
        own = self._rows[row].resized(first + len(index))
        self._rows[row] = replace(
            own,
            mass=own.mass.index_add(0, at, got.mass[kept]),
            queries=own.queries.index_add(0, at, got.queries[kept]),
        )

    def _cut(self, row: int, pages: Sequence[Page], residency: Residency | None) -> list[Repaged]:
        evidence = self._evidence(row, pages)
        own, count = self._rows[row], evidence.num_tokens
        if count >= min(
            own.num_gauged, _GAUGE_TOKENS
        ):  # a short turn says too little of a long text
            gauge = self._sizing.gauge(evidence)
            self._rows[row] = replace(own, gauge=gauge, num_gauged=count)
        sizes = self._sizing.sizes(evidence)
        place_of = at_home if residency is None else residency.place_of
        parts = self._table.repage(row, pages[0].tokens[0], sizes, place_of)
        if residency is not None:
            for part in parts:
                followed = residency.repage(part.old, part.new)
                assert followed, "pages that lie apart were joined"
        return parts

    def _seal(self, row: int, residency: Residency | None) -> None:
        page, gauge = self._table.sequences[row].tail, self._rows[row].gauge
        if page is None:
            return
        if gauge is None:  # no long text yet, by which its tokens could be judged
            is_done = len(page) >= self._page_size
        else:
            is_done = self._sizing.is_tail_done(self._evidence(row, [page]), gauge)
        if is_done and self._table.seal_tail(row) is not None and residency is not None:
            residency.shrink(page)

    def _evidence(self, row: int, pages: Sequence[Page]) -> Evidence:
        """Returns what the method needs to know of text pages, token by token."""
        slots = [slot for page in pages for slot in page.slots]
        needs = self._sizing.needs
        hidden = keys = attention = None
        if "hidden" in needs:
            assert self._pool.hidden is not None, "hidden states were not kept"
            kept = self._pool.hidden
            hidden = kept[
                torch.tensor(slots, device=kept.device)
            ].cpu()  # sizers, as routers, stay there
        if "keys" in needs:
            by_page = [page.slots for page in pages]
            keys = torch.stack([self._read_keys(layer, pages, by_page) for layer in self._layers])
        if "attention" in needs:
            own = self._rows[row]
            tokens = torch.tensor([token for page in pages for token in page.tokens])
            attention = own.mass[tokens] / own.queries[tokens].clamp(min=1)
        return Evidence(len(slots), hidden, keys, attention)


def create_cutter(
    config: OvalConfig, windows: Sequence[int | None], sizer: DynamicPageSizer | None
) -> PageCutter | None:
    """Returns the cutter of one cache; None where every page has the same size.

    Args:
        config: settings.
        windows: sliding window of each decoder layer.
        sizer: what decides under `dynamic`.
    Raises:
        ConfigError: `dynamic` without a sizer.
    """
    routing = config.routing
    if routing is None or routing.sizing == FixedSizing.name:
        return None
    sizing = create_sizing(routing.sizing, config.page_size, sizer)
    layers = list(layer_groups(routing, windows))
    return PageCutter(sizing, layers, config.page_size, routing.max_queries)


def open_page_size(config: OvalConfig) -> int:
    """Returns the slots of a new text page: 32 where a sizing method says when it ends."""
    routing = config.routing
    is_fixed = routing is None or routing.sizing == FixedSizing.name
    return config.page_size if is_fixed else MAX_PAGE_SIZE


def _pages_from(seq: SequencePages, count: int) -> list[Page]:
    """Returns the last pages of a sequence, from the one on that holds the first of its last `count` tokens."""
    first = seq.length - count
    start = len(seq.pages) - 1
    while seq.pages[start].tokens[0] > first:
        start -= 1
    return seq.pages[start:]
