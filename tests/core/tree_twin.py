"""Two caches of one text: one brings token trees and keeps some paths, the other is fed the kept tokens alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from core.dense_twin import CPU, Facts
from reference_tree import RandomTree, accepted_paths, path_attention

from oval_core.attention import create_backend
from oval_core.config import OvalConfig
from oval_core.paged_cache import PagedCache
from oval_core.routing.registry import create_policy
from oval_core.routing.routed import RoutedPolicy
from oval_core.values import LayerSpec, RowRequest

FACTS = Facts(num_layers=4, hidden_size=6)
KV = tuple[torch.Tensor, torch.Tensor]


class TreeTwin:
    """`drafted` and `plain`; attention of every node is compared with a softmax over its own path."""

    def __init__(
        self,
        seed: int,
        rows: int = 2,
        windows: Sequence[int | None] = (None,) * 4,
        softcap: float | None = None,
        compares: bool = True,
        **settings: object,
    ) -> None:
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.rows, self.windows, self.softcap, self.compares = rows, windows, softcap, compares
        self.settings = {"page_size": 4, "track_hidden": True, **settings}
        self.drafted, self.plain = self.cache(), self.cache()
        self.text: list[list[KV]] = [
            [(torch.zeros(2, 0, 8), torch.zeros(2, 0, 8)) for _ in range(4)] for _ in range(rows)
        ]

    def cache(self) -> PagedCache:
        config = OvalConfig(**self.settings)
        policy = create_policy(config, self.windows)
        return PagedCache(config, self.windows, policy, create_backend(config.backend))

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def forward(
        self,
        trees: Sequence[RandomTree],
        accepted: Sequence[Sequence[int]] | None,
        num_queries: int,
        aborts: bool = False,
    ) -> None:
        """One forward of trees, of chains where `accepted` is None; then the kept tokens to the other cache."""
        counts = [len(tree) for tree in trees]
        seen = [tree.seen() for tree in trees]
        begin(self.drafted, counts, num_queries, None if accepted is None else seen)
        kept = [list(range(n)) for n in counts] if accepted is None else accepted
        layers = []
        for layer in range(FACTS.num_layers):
            keys, values = (self.random(self.rows, 2, num_queries, 8) for _ in range(2))
            query = self.random(self.rows, 4, num_queries, 8)
            layers.append((keys, values, query))
            self.drafted.write(layer, keys, values)
            out = self.drafted.attend(layer, query, self.spec(layer))
            if self.compares:
                self.compare(layer, trees, query, (keys, values), out)
        states = self.random(self.rows, num_queries, FACTS.hidden_size)
        if aborts:
            self.drafted.abort()
            return
        self.drafted.commit(states, accepted)
        self.feed(kept, layers, states)

    def spec(self, layer: int) -> LayerSpec:
        return LayerSpec(8**-0.5, self.windows[layer], self.softcap)

    def compare(
        self,
        layer: int,
        trees: Sequence[RandomTree],
        query: torch.Tensor,
        new: KV,
        out: torch.Tensor,
    ) -> None:
        for row, tree in enumerate(trees):
            n = len(tree)
            assert out[row, n:].abs().sum() == 0, "padding got something"
            if n:
                own = new[0][row][:, :n], new[1][row][:, :n]
                asked, text = query[row][:, :n], self.text[row][layer]
                want = path_attention(tree, asked, text, own, self.spec(layer))
                torch.testing.assert_close(out[row, :n].double(), want, atol=1e-5, rtol=1e-5)

    def feed(
        self,
        kept: Sequence[Sequence[int]],
        layers: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        states: torch.Tensor,
    ) -> None:
        counts = [len(own) for own in kept]
        if not max(counts):
            return
        width = max(counts)
        index = torch.tensor([[*own, *[0] * (width - len(own))] for own in kept])

        def chosen(tensor: torch.Tensor) -> torch.Tensor:
            return torch.stack([tensor[row][:, index[row]] for row in range(self.rows)])

        begin(self.plain, counts, width, None)
        for layer, (keys, values, query) in enumerate(layers):
            self.plain.write(layer, chosen(keys), chosen(values))
            self.plain.attend(layer, chosen(query), self.spec(layer))
            for row, own in enumerate(kept):
                past = self.text[row][layer]
                k, v = keys[row][:, list(own)], values[row][:, list(own)]
                self.text[row][layer] = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        self.plain.commit(torch.stack([states[row][index[row]] for row in range(self.rows)]))

    def prompt(self, *counts: int) -> None:
        self.forward([chain(count) for count in counts], None, max(counts))

    def step(self, most: int = 9, aborts: bool = False) -> None:
        """A random tree in every row, some of them empty; the rows are padded on the right."""
        sizes = [self.rng.choice([0, 1, self.rng.randint(1, most)]) for _ in range(self.rows)]
        sizes[self.rng.randrange(self.rows)] = self.rng.randint(1, most)
        trees = [RandomTree(size, self.rng) for size in sizes]
        kept = accepted_paths(trees, self.rng)
        self.forward(trees, kept, max(sizes) + self.rng.choice([0, 0, 1]), aborts)

    def check(self) -> None:
        """Everything that a later forward could see is the same in both caches."""
        self.check_text()
        self.check_memory()

    def check_text(self) -> None:
        """All but what policies remember: by a selection, other queries see other pages."""
        for cache in (self.drafted, self.plain):
            cache.table.check_integrity()
            if cache.tiers is not None:
                cache.tiers.check_integrity()
        assert partition(self.drafted) == partition(self.plain)
        assert self.drafted.table.num_used == self.plain.table.num_used
        assert self.drafted.counters.tokens_written == self.plain.counters.tokens_written
        for row in range(self.rows):
            if not self.drafted.table.sequences[row].length:
                continue
            for layer in range(FACTS.num_layers):
                got = self.drafted.gather(layer, row)
                for one, other in zip(got, self.text[row][layer], strict=True):
                    assert torch.equal(one, other)
                bounds = [c.summaries.key_bounds(layer, row) for c in (self.drafted, self.plain)]
                assert torch.equal(bounds[0].lower, bounds[1].lower)
                assert torch.equal(bounds[0].upper, bounds[1].upper)
                torch.testing.assert_close(bounds[0].mean, bounds[1].mean)
            hidden = [c.summaries.last_hidden(row) for c in (self.drafted, self.plain)]
            assert torch.equal(*hidden)
            means = [c.summaries.hidden_mean(row) for c in (self.drafted, self.plain)]
            torch.testing.assert_close(*means)

    def check_memory(self) -> None:
        for row in range(self.rows):
            got, want = (remembered(cache, row) for cache in (self.drafted, self.plain))
            assert got.keys() == want.keys()
            for name in got:
                torch.testing.assert_close(got[name], want[name], atol=1e-5, rtol=1e-4, msg=name)


def chain(count: int) -> RandomTree:
    tree = RandomTree(count, random.Random(0))
    tree.parents = list(range(-1, count - 1))
    return tree


def begin(
    cache: PagedCache,
    counts: Sequence[int],
    num_queries: int,
    seen: Sequence[torch.Tensor] | None,
) -> None:
    requests = [
        RowRequest(
            count,
            None if count == num_queries else torch.arange(count),
            tree=None if seen is None or not count else seen[row],
        )
        for row, count in enumerate(counts)
    ]
    cache.begin(requests, num_queries, CPU)


def partition(cache: PagedCache) -> list[list[tuple[list[int], bool]]]:
    return [[(list(p.tokens), p.sealed) for p in seq.pages] for seq in cache.table.sequences]


def remembered(cache: PagedCache, row: int) -> dict[str, torch.Tensor]:
    """What a policy that selects knows of a row, pages by their place in it; what a cutter knows."""
    found: dict[str, torch.Tensor] = {}
    if cache._cutter is not None:
        own = cache._cutter._rows[row]
        found |= {"token mass": own.mass, "token queries": own.queries}
        found["gauge"] = torch.tensor(own.gauge or ())
    if not isinstance(cache.policy, RoutedPolicy):
        return found
    seq, memory = cache.table.sequences[row], cache.policy._rows[row].clone()
    memory.settle(seq)
    for name in ("last", "fast", "slow", "total", "peak", "steps", "chosen", "age"):
        found[name] = getattr(memory.history, name).float()
    if memory.queries is not None:
        found["queries"] = memory.queries
    if memory.book is not None:
        place = {page.page_id: i for i, page in enumerate(seq.pages)}
        found["book"] = torch.tensor([place[i] for i in memory.book.page_ids])
        for name, held in memory.book._held.items():
            found[f"book {name}"] = held[:, :, : memory.book.num_pages]
    if memory.graph is not None:
        memory.graph.rebuild()
        place = {page.page_id: i for i, page in enumerate(seq.pages)}
        pairs = sorted((place[a], place[b], n) for (a, b), n in memory.graph.counts().items())
        found["graph"] = torch.tensor(pairs)
    return found
