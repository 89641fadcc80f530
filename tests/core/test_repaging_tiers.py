"""Pages of other sizes while K and V are on tiers: places in the pool follow, and attention is the same."""

from __future__ import annotations

import random

import pytest
from core.dense_twin import DenseTwin
from core.repaged_table import RepagedTable, filled, partition
from core.test_page_table import PAGE_SIZES
from core.tier_twin import TierTwin
from hypothesis import given, settings
from hypothesis import strategies as st

from oval_core.config import MAX_PAGE_SIZE
from oval_core.page_table import PageTable
from oval_core.tiers.residency import Residency


def pool_places(table: PageTable, residency: Residency) -> dict[tuple[int, int], int]:
    """Where the pool keeps each token (row, token) that it has."""
    return {
        (row, token): slot + residency.shift(page)
        for row, seq in enumerate(table.sequences)
        for page in seq.pages
        if page.page_id in residency
        for slot, token in zip(page.slots, page.tokens, strict=True)
    }


@settings(max_examples=80, deadline=None, derandomize=True)
@given(PAGE_SIZES, st.lists(st.integers(1, 90), min_size=1, max_size=2), st.data())
def test_the_pool_follows(page_size: int, counts: list[int], data: st.DataObject) -> None:
    checked = RepagedTable(page_size, len(counts))
    checked.append_all(counts)
    for row, count in enumerate(counts):
        checked.commit(row, count)
    table = checked.table
    residency = Residency(2 * table.num_slots, 0, 0)
    pages = data.draw(st.permutations(table.pages()))
    for page in pages:  # somewhere, in any order, with gaps
        residency.place(page, data.draw(st.sampled_from([None, *pages])))
    tails = {seq.tail.page_id for seq in table.sequences if seq.tail is not None}
    for page in pages:
        if page.page_id not in tails and data.draw(st.integers(0, 4)) == 0:
            residency.remove(page.page_id)
    away = {page.page_id for page in pages} - residency.page_ids
    before, used = pool_places(table, residency), residency.num_used
    for row, count in enumerate(counts):
        done = table.repage(row, 0, partition(data, count), residency.place_of)
        assert all(residency.repage(part.old, part.new) for part in done)
        sealed = table.seal_tail(row)
        if sealed is not None:
            residency.shrink(sealed)
    checked.check()
    residency.check_integrity()
    assert pool_places(table, residency) == before
    assert {page.page_id for page in table.pages()} == residency.page_ids | away
    assert residency.num_used <= used
    assert residency.num_used == sum(
        page.capacity for page in table.pages() if page.page_id in residency
    )


def test_a_pool_that_cannot_follow_stays_as_it_is() -> None:
    checked = filled(8, 32)
    table = checked.table
    first, second, third, fourth = table.sequences[0].pages
    residency = Residency(64, 0, 0)
    residency.place(first, None)
    residency.place(third, first)  # behind the first: not as the slots lie
    residency.place(fourth, third)
    (whole,) = checked.repage(0, 0, [4, 28])
    before, version = (set(residency.page_ids), residency.num_used), residency.version
    assert not residency.repage(whole.old, whole.new), "the second is not there"
    empty = Residency(64, 0, 0)
    assert not empty.repage(whole.old, whole.new), "none is there"
    assert not empty.page_ids
    assert not residency.repage((first, third), whole.new), "another shift"
    assert (set(residency.page_ids), residency.num_used) == before
    assert residency.version == version
    residency.check_integrity()
    residency.remove(third.page_id)
    residency.place(second, first)
    residency.place(third, second)  # its place is taken by the fourth
    assert not residency.repage(whole.old, whole.new)
    for page in (third, fourth):
        residency.remove(page.page_id)
    residency.place(third, second)
    residency.place(fourth, third)
    version = residency.version
    assert residency.repage(whole.old, whole.new)
    assert residency.version > version
    residency.check_integrity()


def test_the_least_recently_read_leave_first_after_repaging_too() -> None:
    checked = filled(8, 40)
    table = checked.table
    residency = Residency(64, 0, 0)
    last = None
    for page in table.sequences[0].pages:
        residency.place(page, last)
        last = page
    old = [page.page_id for page in table.sequences[0].pages]
    residency.read(old, 1)
    residency.read(old[:2], 2)
    for part in table.repage(0, 0, [4, 12, 16, 8], residency.place_of):
        assert residency.repage(part.old, part.new)
    new = table.sequences[0].pages
    victims = residency.victims(table, [60], [])
    assert [page.tokens[0] for page in victims] == [16, 32, 0, 4]
    assert victims == [new[2], new[3], new[0], new[1]]


def repage_cache(twin: DenseTwin, row: int, rng: random.Random) -> None:
    """What a cache does between two forwards."""
    cache, tiers = twin.cache, twin.cache.tiers
    seq = cache.table.sequences[row]
    shared = [page.page_id for page in seq.pages if page.num_refs > 1]
    first = sum(len(p) for p in seq.pages if p.page_id in shared)
    sizes: list[int] = []
    while sum(sizes) < seq.length - first:
        sizes.append(min(rng.randint(1, MAX_PAGE_SIZE), seq.length - first - sum(sizes)))
    place_of = [tiers.residency.place_of] if tiers is not None else []
    for part in cache.table.repage(row, first, sizes, *place_of):
        if tiers is not None:
            assert tiers.residency.repage(part.old, part.new)
    if rng.random() < 0.5:
        sealed = cache.table.seal_tail(row)
        if sealed is not None and tiers is not None:
            tiers.residency.shrink(sealed)
    cache._memory.settle()


@pytest.mark.parametrize("has_tiers", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_attention_is_the_same_over_other_pages(has_tiers: bool, seed: int) -> None:
    rng, rows = random.Random(seed), 1 + seed % 2
    twin: DenseTwin
    if has_tiers:
        twin = TierTwin({"fast_tokens": 250 * rows, "sink_tokens": 4, "recent_tokens": 8})
    else:
        twin = DenseTwin(page_size=4)
    for count in (30, 5, 1, 40, 1, 60, 60, 1):
        twin.forward([count] * rows)
        repage_cache(twin, rng.randrange(rows), rng)
        twin.check()
        if twin.cache.tiers is not None:
            twin.cache.tiers.check_integrity()
    assert twin.cache.tiers is None or twin.cache.tiers.num_away > 0, "nothing left fast memory"
    twin.truncate([rng.randint(20, 190) for _ in range(rows)])
    twin.reorder([0, *range(rows)])
    repage_cache(twin, rows, rng)
    twin.forward([3] * (rows + 1))
    twin.check()
    twin.cache.close()
