"""A tiered `PagedCache` beside dense K and V, and what the tests of the tiers look at behind its back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch
from core.dense_twin import DenseTwin, Facts

from oval_core.attention import create_backend
from oval_core.config import OvalConfig
from oval_core.errors import FastMemoryError
from oval_core.paged_cache import PagedCache
from oval_core.routing.registry import create_policy
from oval_core.tiers.disk_store import DiskStore
from oval_core.tiers.page_stream import PageStream
from oval_core.tiers.prefetcher import Prefetcher
from oval_core.tiers.transfer import State

FACTS = Facts(num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4, value_dim=4, hidden_size=2)
DEADLINE_S = 10.0


class TierTwin(DenseTwin):
    """`DenseTwin` with `tiers`; real windows of the layers, if given, are what `forward` must be told too."""

    def __init__(
        self,
        tiers: dict[str, object],
        facts: Facts = FACTS,
        windows: Sequence[int | None] | None = None,
        has_windows: bool = False,
        compares: bool = True,
        **settings: object,
    ) -> None:
        settings = {"page_size": 4, **settings, "tiers": tiers}
        super().__init__(facts, has_windows, compares, **settings)
        if windows is not None:
            config = OvalConfig(**settings)
            policy, backend = create_policy(config, windows), create_backend(config.backend)
            self.cache = PagedCache(config, windows, policy, backend)

    def fill(self, rows: int = 1, count: int = 8, pages: int = 8) -> TierTwin:
        """Forwards until so many pages had to leave."""
        while self.cache.tiers is None or self.cache.tiers.num_away < pages:
            assert max(self.lengths, default=0) < 400, "nothing leaves: the test tests nothing"
            self.forward([count] * rows)
        return self

    def check_all(self, others: Sequence[PagedCache] = ()) -> None:
        """K and V, both integrities, and the totals."""
        self.check()
        assert self.cache.tiers is not None
        self.cache.tiers.check_integrity()
        check_totals([self.cache, *others])

    def try_forward(self, counts: Sequence[int], **facts: object) -> bool:
        """Whether the forward fitted; one that does not must change nothing."""
        try:
            self.forward(counts, **facts)
        except FastMemoryError:
            assert not self.cache.is_running
            return False
        return True


def stream_of(cache: PagedCache) -> PageStream:
    assert cache.tiers is not None
    assert cache.tiers.slow._stream is not None
    return cache.tiers.slow._stream


def prefetcher_of(cache: PagedCache) -> Prefetcher:
    assert cache.tiers is not None
    assert cache.tiers.slow._prefetcher is not None
    return cache.tiers.slow._prefetcher


def disk_of(cache: PagedCache) -> DiskStore:
    """The cache's disk store, behind main memory or not."""
    assert cache.tiers is not None
    store = cache.tiers.slow._store
    disk = getattr(store, "_disk", store)
    assert isinstance(disk, DiskStore)
    return disk


def wait_idle(cache: PagedCache) -> None:
    """Waits until the worker has made everything that was asked of it."""
    assert cache.tiers is not None
    if cache.tiers.slow._stream is None:
        return
    end = time.monotonic() + DEADLINE_S
    ahead = stream_of(cache)._ahead
    while any(t.state in (State.QUEUED, State.RUNNING) for t in ahead.values()):
        assert time.monotonic() < end, "the worker does not get done"
        time.sleep(0.0005)


def check_totals(caches: Iterable[PagedCache]) -> None:
    """used + wasted + waiting == prefetched, over caches that share their totals."""
    waiting = 0
    for cache in caches:
        assert cache.tiers is not None
        wait_idle(cache)
        if cache.tiers.slow._stream is not None:
            stream_of(cache).count()
        waiting += cache.tiers.slow.bytes_waiting
        totals = cache.counters.tiers
    assert totals.bytes_used + totals.bytes_wasted + waiting == totals.bytes_prefetched
    assert totals.bytes_late <= totals.bytes_prefetched + totals.bytes_demanded


def check_buffers(cache: PagedCache) -> None:
    """Every buffer is free once nothing is fetched ahead, and each is there once."""
    stream = stream_of(cache)
    stream.drain()
    assert cache.tiers is not None
    assert len(stream._free) == cache.tiers.memory.num_buffers
    assert len({id(buffer) for buffer in stream._free}) == len(stream._free)
    assert not stream._ahead
    check_totals([cache])


def away_ids(cache: PagedCache) -> list[int]:
    """Pages that are in a slow tier only."""
    assert cache.tiers is not None
    return [
        page.page_id
        for page in cache.table.pages()
        if page.page_id not in cache.tiers.residency and page.page_id in cache.tiers.slow
    ]


def random_masks(twin: DenseTwin, part: float = 0.4) -> list[torch.Tensor | None]:
    """Hides some cached keys of every other row."""
    return [
        torch.rand(length) < part if row % 2 == 0 else None
        for row, length in enumerate(twin.lengths)
    ]
