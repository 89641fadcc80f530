"""What the cache counts, how much memory it takes, and how often it moves it."""

from __future__ import annotations

import pytest
import torch
from core.dense_twin import CPU, DenseTwin, Facts, new_cache

from oval_core.values import RowRequest


def test_counters() -> None:
    twin = DenseTwin(page_size=4)
    twin.forward([10, 3], reserve=64)
    twin.forward([1, 1], commit=False)
    twin.forward([2, 0])
    twin.truncate([5, 3])
    twin.reorder([0, 0])
    counted = twin.cache.counters.to_dict()
    assert counted == {
        "forwards": 2,
        "tokens_written": 15,
        "tokens_dropped": 7,
        "slots_copied": 1,
        "pool_growths": 1,
        "peak_slots": 16,
        "peak_bytes": twin.cache.pool.bytes_allocated,
    }
    per_slot = 2 * 2 * (8 + 8) * 4  # layers, KV heads, head dims, bytes
    assert twin.cache.pool.bytes_per_token == per_slot
    assert counted["peak_bytes"] == per_slot * twin.cache.table.num_slots


def test_peaks_stay_when_the_cache_shrinks() -> None:
    twin = DenseTwin(page_size=4)
    twin.forward([40])
    peak = twin.cache.counters.peak_slots
    twin.truncate([1])
    twin.forward([1])
    assert twin.cache.counters.peak_slots == peak == 40


# Only rounding may be added to a reserve: up to a page for each row, and one page for each row that the first
# forward keeps free. From 40 pages a row on that is below 5 %.
@pytest.mark.parametrize(("rows", "prompt"), [(1, 1000), (1, 1), (4, 700), (3, 1024)])
def test_a_reserve_is_all_the_memory_there_is(rows: int, prompt: int) -> None:
    total, facts = 1024, Facts(num_layers=1)
    cache = new_cache(facts, page_size=16)
    twin = DenseTwin(facts)
    twin.cache = cache
    step = prompt
    for _ in range(60):
        if step:
            twin.begin([step] * rows, reserve=total)
            cache.write(0, *twin.random_kv(rows, step))
            cache.commit()
        step = min(32, total - cache.table.sequences[0].length)
    exact = rows * total * cache.pool.bytes_per_token
    assert cache.table.sequences[0].length == total
    assert exact <= cache.counters.peak_bytes <= 1.05 * exact
    assert cache.counters.pool_growths == 1
    assert cache.counters.slots_copied == 0


@pytest.mark.parametrize("reserve", [0, 64])
@pytest.mark.parametrize("rows", [1, 3])
def test_growth_copies_a_linear_number_of_slots(rows: int, reserve: int) -> None:
    """Also when a reserve was given and is outgrown, as in a later turn of a chat."""
    cache = new_cache(Facts(num_layers=0), page_size=16)
    for _ in range(2000):
        cache.begin([RowRequest(1)] * rows, 1, CPU, reserve)
        cache.commit()
    assert cache.counters.slots_copied <= 9 * rows * 2000
    assert cache.table.num_slots <= 1.2 * rows * 2000


def test_beams_within_the_reserve_never_grow_the_pool() -> None:
    cache = new_cache(Facts(num_layers=0), page_size=16)
    generator = torch.Generator().manual_seed(0)
    cache.begin([RowRequest(100)] * 4, 100, CPU, 256)
    cache.commit()
    for _ in range(150):
        cache.reorder(torch.randint(4, (4,), generator=generator).tolist())
        cache.begin([RowRequest(1)] * 4, 1, CPU, 256)
        cache.commit()
        cache.table.check_integrity()
    assert cache.counters.pool_growths == 1
