"""Slow, shuffled, cancelled transfers change times, never results."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from core.tier_twin import TierTwin, check_buffers, stream_of

from oval_core.tiers import slow_tier
from oval_core.tiers.prefetcher import Prefetcher
from oval_core.tiers.transfer import Transfer

PLACES = ["host", "disk", "spill", "direct"]


def tiers_at(where: str, folder: Path, **settings: object) -> dict[str, Any]:
    extra: dict[str, Any] = {} if where == "host" else {"disk": str(folder)}
    if where == "spill":
        extra["host_tokens"] = 24
    if where == "direct":
        extra["direct_io"] = True
    small = {"fast_tokens": 96, "sink_tokens": 4, "recent_tokens": 8}
    return {**small, **extra, **settings}


@pytest.fixture
def chaos(monkeypatch: pytest.MonkeyPatch) -> random.Random:
    """Every transfer waits a little, before or after, and the queue has no order."""
    dice = random.Random(7)
    real_mover, real_submit = slow_tier.create_mover, Prefetcher.submit

    def create(*args: Any) -> Any:
        move = real_mover(*args)

        def late(transfer: Transfer) -> None:
            time.sleep(dice.choice((0.0, 0.0, 0.0005, 0.002)))
            move(transfer)
            time.sleep(dice.choice((0.0, 0.0, 0.001)))

        return late

    def shuffled(self: Prefetcher, transfer: Transfer) -> None:
        transfer.priority = dice.random()
        real_submit(self, transfer)

    monkeypatch.setattr(slow_tier, "create_mover", create)
    monkeypatch.setattr(Prefetcher, "submit", shuffled)
    return dice


@pytest.mark.parametrize("prefetch", ["oracle", "layer", "recent"])
@pytest.mark.parametrize("where", PLACES)
def test_a_late_and_shuffled_worker(
    where: str, prefetch: str, chaos: random.Random, tmp_path: Path
) -> None:
    twin = TierTwin(tiers_at(where, tmp_path, prefetch=prefetch))
    twin.fill(rows=2)
    for _ in range(14):
        twin.try_forward([chaos.randint(0, 2), chaos.randint(1, 3)])
        stream = stream_of(twin.cache)
        for key in list(stream._ahead):
            if chaos.random() < 0.5:
                stream._discard(key)
        if chaos.random() < 0.3:
            twin.truncate([length - chaos.randint(0, 5) for length in twin.lengths])
        if chaos.random() < 0.3:
            twin.reorder([chaos.randint(0, 1), 1])
        if chaos.random() < 0.2:
            twin.try_forward([2, 2], commit=False)
    twin.check_all()
    check_buffers(twin.cache)
    twin.reset()
    assert twin.cache.tiers.slow.bytes_waiting == 0
    twin.fill(rows=2).check_all()
    twin.cache.close()


def test_reading_while_the_worker_reads_past_the_page_cache(
    chaos: random.Random, tmp_path: Path
) -> None:
    """Two threads read one file at the same time; neither may see the other's bytes."""
    twin = TierTwin(tiers_at("direct", tmp_path, prefetch="oracle")).fill()
    for _ in range(6):
        twin.forward([1])
        twin.check()
    twin.cache.close()


def test_a_modelled_link_changes_times_only(tmp_path: Path) -> None:
    link = {"link_gbps": 0.02, "link_latency_us": 300.0}
    twin = TierTwin(tiers_at("disk", tmp_path, **link)).fill()
    fast = TierTwin(tiers_at("disk", tmp_path)).fill()
    for step in (twin, fast):
        for _ in range(4):
            step.forward([1])
        step.check_all()
    slow, quick = twin.cache.counters.tiers, fast.cache.counters.tiers
    assert slow.transfer_s >= slow.transfers * 300e-6
    assert slow.bytes_stored == quick.bytes_stored
    assert slow.bytes_used + slow.bytes_demanded == quick.bytes_used + quick.bytes_demanded


def test_an_exception_while_a_batch_is_read_loses_no_buffer() -> None:
    """Even while its traceback is kept, and with it the frames that were reading."""
    twin = TierTwin({"fast_tokens": 64, "prefetch": "none"}).fill()
    backend = twin.cache.tiers._backend
    real, kept, left = backend.attend_parts, [], [0]

    def breaks(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError("in a batch")
        return real(*args)

    for _ in range(4):
        left[0] = 2  # the first part is the pool's
        backend.attend_parts = breaks
        try:
            twin.forward([1])
        except MemoryError as error:
            kept.append(error)
        finally:
            del backend.attend_parts
        twin.cache.abort()
    assert len(kept) == 4
    twin.forward([1])
    twin.check_all()
    check_buffers(twin.cache)
