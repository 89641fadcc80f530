"""A sequence of random content and a model's shape, as routers see it while a model decodes: to time what they cost.

Shapes: Y routed layers, H query heads, D head dim, G layer groups, P pages, C hidden size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from oval_adapters.families import decoder_family
from oval_core.config import RoutingConfig
from oval_core.page_table import PageTable
from oval_core.pages import Page
from oval_core.routing.cooccurrence import GRAPH_PAGES, CooccurrenceGraph
from oval_core.routing.key_book import KeyBook
from oval_core.routing.key_signals import SIGNALS, create_signal, group_log_mass
from oval_core.routing.layer_groups import layer_groups
from oval_core.routing.router import Router
from oval_core.routing.view import PageHistory, PageView

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_OF_QUEST = ("cross_layer",)  # the same summaries with another query


class SelectorScene:
    """One sequence of P full pages, with a history, key summaries and a graph."""

    def __init__(
        self,
        config: PretrainedConfig,
        routing: RoutingConfig,
        *,
        num_pages: int,
        page_size: int,
        needs: frozenset[str],
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        """Makes the sequence.

        Args:
            config: of the model.
            routing: which layers are routed, in which groups.
            num_pages: P.
            page_size: tokens a page.
            needs: parts of a view, of all routers that will be timed.
            dtype: of keys and queries.
            seed: of the content.
        """
        text = config.get_text_config(decoder=True)
        self._generator = torch.Generator().manual_seed(seed)
        self._groups = layer_groups(routing, decoder_family(config).windows(text))
        self.num_groups = 1 + max(self._groups.values())
        self._hidden = self._draw(text.hidden_size)
        self._page_hidden = self._draw(num_pages, text.hidden_size)
        self._starts = torch.arange(num_pages) * page_size
        self.counts = torch.full((num_pages,), page_size)
        self._lead = routing.lead
        heads = text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        self._queries = self._draw(len(self._groups), heads, dim).to(dtype)
        self._book = self._make_book(num_pages, page_size, (kv_heads, dim), needs, dtype)
        mass = self._draw(self.num_groups, num_pages).softmax(-1)
        shape = self.num_groups, num_pages
        read = torch.ones(shape, dtype=torch.bool)
        self._history = PageHistory.empty(*shape).observe(mass, mass, read)
        self._free = mass.log()
        self._graph = CooccurrenceGraph()
        for _ in range(num_pages if "graph" in needs else 0):
            drawn = torch.randperm(num_pages, generator=self._generator)[:GRAPH_PAGES]
            self._graph.observe(drawn.tolist())

    def score(self, router: Router) -> torch.Tensor:
        """Returns the router's scores [G, P], after all that it needs was computed as in a decode step."""
        with torch.no_grad():
            return router.score(self.view(router))

    def view(self, router: Router) -> PageView:
        """Returns the pages as the router sees them, its key signals computed anew."""
        needs = router.needs
        ids = range(len(self._starts))
        return PageView(
            starts=self._starts,
            counts=self.counts,
            length=int(self.counts.sum()),
            history=self._history,
            hidden=self._hidden if "hidden" in needs else None,
            page_hidden=self._page_hidden if "page_hidden" in needs else None,
            signals={n: self._signal(n) for n in needs - {"hidden", "page_hidden", "graph"}},
            graph=self._graph.adjacency(ids) if "graph" in needs else None,
            lead=self._lead,
        )

    def _signal(self, name: str) -> torch.Tensor:
        known = _summarised(name)
        if known is None:
            return self._free
        scores = self._book.scores(known, self._queries)
        is_mean = self._book.signal(known).is_mean
        groups = list(self._groups.values())
        return group_log_mass(scores, self._book.counts, groups, is_mean=is_mean)

    def _make_book(
        self,
        num_pages: int,
        page_size: int,
        key_shape: tuple[int, int],
        needs: frozenset[str],
        dtype: torch.dtype,
    ) -> KeyBook:
        table = PageTable(page_size)
        table.open_sequences(1)
        table.make_room(table.text_regions(0, num_pages * page_size), 0)
        table.append(0, num_pages * page_size)
        table.commit(0, num_pages * page_size)
        kv_heads, dim = key_shape

        def read_keys(
            layer_idx: int, pages: Sequence[Page], slots: Sequence[Sequence[int]]
        ) -> torch.Tensor:
            return self._draw(kv_heads, sum(len(page) for page in pages), dim).to(dtype)

        names = sorted({known for name in needs if (known := _summarised(name))})
        book = KeyBook(list(self._groups), [create_signal(n, dim**-0.5, page_size) for n in names])
        if names:
            book.refresh(table.sequences[0], read_keys)
        return book

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator)


def times_ms(action: Callable[[], object], rounds: int, warmup: int = 3) -> list[float]:
    """Returns the milliseconds of each round."""
    times = []
    for number in range(warmup + rounds):
        begin = time.perf_counter()
        action()
        if number >= warmup:
            times.append(1e3 * (time.perf_counter() - begin))
    return times


def selector_ms(scene: SelectorScene, router: Router, rounds: int = 15) -> float:
    """Returns the median time to score the pages of the sequence once."""
    return statistics.median(times_ms(lambda: scene.score(router), rounds))


def _summarised(name: str) -> str | None:
    """Returns the signal whose summaries are scored; None where none are, as for the oracles."""
    if name in _OF_QUEST:
        return "quest"
    return name if name in SIGNALS else None
