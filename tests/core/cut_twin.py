"""`RoutedTwin` whose pages are cut by a sizing method, and what that method must be told, from plain tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from core.routed_twin import FACTS, RoutedTwin

from oval_core.attention import create_backend
from oval_core.config import OvalConfig
from oval_core.paged_cache import PagedCache
from oval_core.routing.page_cutter import PageCutter
from oval_core.routing.page_sizer import DynamicPageSizer
from oval_core.routing.registry import create_policy
from oval_core.routing.sizing import Evidence, PageSizing, create_sizing

ROUTING = {
    "token_budget": 40,
    "num_sink_tokens": 4,
    "window_size": 4,
    "layer_groups": 2,
    "max_queries": 6,
    "coverage": 0.5,
    "router": "ema",
}
TIERS = {"fast_tokens": 350, "sink_tokens": 4, "recent_tokens": 16}


def random_sizer(page_size: int = 8) -> DynamicPageSizer:
    sizer = DynamicPageSizer(FACTS.hidden_size, page_size)
    sizer.head.weight.data = torch.randn(1, FACTS.hidden_size)
    return sizer


class CutTwin(RoutedTwin):
    """Pages of 8 on average; layers 2 and 3 are routed, of which layer 2 is looked at."""

    def __init__(self, sizing: str, **settings: object) -> None:
        routing = {**ROUTING, **settings.pop("routing", {}), "sizing": sizing}
        settings = {"page_size": 8, "policy": "routed", **settings, "routing": routing}
        self.sizer = random_sizer() if sizing == "dynamic" else None
        super().__init__(**{**settings, "routing": {**routing, "sizing": "fixed"}})
        config = OvalConfig(**settings)
        windows = [None] * FACTS.num_layers
        policy, backend = create_policy(config, windows), create_backend(config.backend)
        self.cache = PagedCache(config, windows, policy, backend, sizer=self.sizer)

    @property
    def cutter(self) -> PageCutter:
        assert self.cache._cutter is not None
        return self.cache._cutter

    @property
    def sizing(self) -> PageSizing:
        routing = self.cache.config.routing
        assert routing is not None
        return create_sizing(routing.sizing, 8, self.sizer)

    def sizes(self, row: int = 0) -> list[int]:
        return [len(page) for page in self.cache.table.sequences[row].pages]

    def evidence(self, row: int, first: int) -> Evidence:
        """Of the tokens from `first` on, without attention."""
        hidden, keys = self.hidden[row][first:], self.keys[row][2][None, :, first:]
        return Evidence(len(hidden), hidden, keys)

    def check_all(self) -> None:
        self.check()
        for page in self.cache.table.pages():
            assert len(page) <= 32
            assert len(page) == page.capacity or not page.sealed
        if self.cache.tiers is not None:
            self.cache.tiers.check_integrity()

    def forward(self, counts: Sequence[int], *given: object, **facts: object) -> None:
        super().forward(counts, *given, **facts)
        if facts.get("commit", True):
            for row, count in enumerate(counts):
                if count:
                    self.check_memory(row)

    def check_memory(self, row: int) -> None:
        """After a forward nothing is remembered of pages that ended, and every sealed page has its summary."""
        seq, memory = self.cache.table.sequences[row], self.policy._rows[row]
        ids = [page.page_id for page in seq.pages]
        assert memory._waiting is not None
        seen = memory._waiting[1]
        assert set(seen.page_ids) <= set(ids)
        assert len(set(seen.page_ids)) == len(seen.page_ids)
        layers = self.policy.num_groups
        torch.testing.assert_close(seen.mass.sum(-1), torch.ones(len(seen.mass), layers))
        assert set(memory._page_ids) <= set(ids)
        if memory.book is not None:
            assert memory.book.page_ids == [page.page_id for page in seq.pages if page.sealed]
            assert memory.book.counts.tolist() == [len(p) for p in seq.pages if p.sealed]
