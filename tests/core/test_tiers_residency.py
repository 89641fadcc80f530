"""Who leaves fast memory first, how the budget is shared out, and what the settings refuse."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from core.tier_twin import TierTwin
from hypothesis import given, settings
from hypothesis import strategies as st

from oval_core.config import PREFETCH_NAMES, OvalConfig, TierConfig
from oval_core.errors import ConfigError, FastMemoryError
from oval_core.page_table import PageTable
from oval_core.slot_allocator import SlotAllocator
from oval_core.tiers.fast_memory import share_out
from oval_core.tiers.residency import Residency


def placed(
    lengths: list[int], sinks: int = 0, recent: int = 0, slots: int = 200
) -> tuple[PageTable, Residency]:
    """A table with pages of 4, all of them in a pool."""
    table = PageTable(4)
    table.open_sequences(len(lengths))
    table.make_room([4] * sum(-(-n // 4) for n in lengths))
    residency = Residency(slots, sinks, recent)
    for row, length in enumerate(lengths):
        table.append(row, length)
        table.commit(row, length)
        for page in table.sequences[row].pages:
            residency.place(page, None)
    return table, residency


def leaving(table: PageTable, residency: Residency, hold: Any = ()) -> list[int]:
    """First tokens of the pages in the order in which they would leave."""
    return [p.tokens[0] for p in residency.victims(table, [10_000], hold)]


def test_the_oldest_leave_first_sinks_and_recent_last() -> None:
    assert leaving(*placed([40])) == [0, 4, 8, 12, 16, 20, 24, 28, 32, 36]
    assert leaving(*placed([40], sinks=8)) == [8, 12, 16, 20, 24, 28, 32, 36, 0, 4]
    assert leaving(*placed([40], sinks=5)) == [8, 12, 16, 20, 24, 28, 32, 36, 0, 4]
    assert leaving(*placed([40], recent=8)) == [0, 4, 8, 12, 16, 20, 24, 28, 32, 36]
    assert leaving(*placed([40], sinks=4, recent=9)) == [4, 8, 12, 16, 20, 24, 0, 28, 32, 36]
    assert leaving(*placed([40], sinks=100)) == list(range(0, 40, 4))


def test_open_and_held_pages_stay() -> None:
    table, residency = placed([18])
    assert leaving(table, residency) == [0, 4, 8, 12], "the open page stays"
    held = {table.sequences[0].pages[1].page_id}
    assert leaving(table, residency, held) == [0, 8, 12]
    residency.remove(table.sequences[0].pages[0].page_id)
    assert leaving(table, residency, held) == [8, 12]


def test_low_scores_leave_first_then_what_was_not_read_lately() -> None:
    table, residency = placed([24], sinks=4)
    ids = [page.page_id for page in table.sequences[0].pages]
    residency.read([ids[1], ids[2]], 5)
    residency.read([ids[3]], 3)
    assert leaving(table, residency) == [16, 20, 12, 4, 8, 0]
    residency.scores = {ids[4]: 2.0, ids[5]: -1.0, ids[0]: -9.0}
    assert leaving(table, residency) == [20, 12, 4, 8, 16, 0]


def test_no_more_leave_than_must() -> None:
    table, residency = placed([40], slots=44)
    assert residency.fits([4])
    assert [p.tokens[0] for p in residency.victims(table, [4, 4, 4], ())] == [0, 4]
    scattered = Residency(12, 0, 0)
    pages = table.sequences[0].pages
    for page in pages[:3]:
        scattered.place(page, None)
    scattered.remove(pages[0].page_id)
    scattered.remove(pages[2].page_id)
    assert not scattered.fits([8])
    chosen = scattered.victims(table, [8], ())
    assert [p.page_id for p in chosen] == [pages[1].page_id], "room enough, but in pieces"


def test_a_page_is_placed_behind_the_one_before_it_and_its_slots_come_back() -> None:
    table, residency = placed([16], slots=40)
    pages = table.sequences[0].pages
    version = residency.version
    residency.remove(pages[1].page_id)
    residency.remove(pages[1].page_id)
    assert residency.version == version + 1
    residency.place(pages[1], pages[0])
    residency.check_integrity()
    first, second = (residency.shift(p) + p.base for p in pages[:2])
    assert second == first + 4
    assert residency.num_used == 16
    clone = residency.clone()
    residency.clear()
    assert residency.num_used == 0
    assert clone.page_ids == {page.page_id for page in pages}
    clone.check_integrity()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(fast=st.integers(1, 4000), layers=st.integers(1, 48), page_size=st.integers(1, 32))
def test_the_budget_is_never_exceeded(fast: int, layers: int, page_size: int) -> None:
    try:
        memory = share_out(fast, layers, page_size)
    except ConfigError as error:
        message = str(error)
        assert message.startswith(f"tiers.fast_tokens: got {fast}. Allowed with {layers} ")
        least = int(message.split(f"pages of {page_size}: ")[1].split(" ")[0])
        assert least > fast
        share_out(least, layers, page_size)
        with pytest.raises(ConfigError):
            share_out(least - 1, layers, page_size)
        return
    used = memory.pool_slots * layers + memory.num_buffers * memory.buffer_tokens
    assert used <= fast * layers
    assert memory.pool_slots >= 4 * page_size
    assert memory.pool_slots % page_size == 0
    assert 2 <= memory.num_buffers <= 4
    assert memory.buffer_tokens >= 32, "a buffer must hold the largest page"
    assert used > fast * layers / 2 - 32 * layers, "half of it is not used"


@pytest.mark.parametrize("dense", [(), (0, 2)])
def test_memory_stays_within_the_budget(dense: tuple[int, ...]) -> None:
    fast = 140
    twin = TierTwin({"fast_tokens": fast, "dense_layers": dense}).fill(pages=20)
    facts, tiers = twin.facts, twin.cache.tiers
    token = facts.num_kv_heads * (facts.head_dim + facts.value_dim) * facts.dtype.itemsize
    assert tiers.bytes_allocated <= fast * len(tiers.layers) * token
    assert tiers.pool.num_slots == tiers.memory.pool_slots
    assert tiers.residency.num_used <= tiers.memory.pool_slots
    twin.check_all()


def test_a_forward_that_does_not_fit_says_what_to_do() -> None:
    twin = TierTwin({"fast_tokens": 48, "prefetch": "none"}).fill(pages=2)
    slots = twin.cache.tiers.memory.pool_slots
    for counts in ([slots + 1], [500]):
        with pytest.raises(FastMemoryError) as caught:
            twin.forward(counts)
        message = str(caught.value)
        assert "a forward needs" in message
        assert f"tiers.fast_tokens=48 has {slots}" in message
        assert "prefill_chunk_size" in message
        twin.check_all()
    twin.forward([8])
    twin.check_all()
    fresh = TierTwin({"fast_tokens": 48})
    with pytest.raises(FastMemoryError):
        fresh.forward([500])
    assert fresh.cache.batch_size == 0
    fresh.fill(rows=2).check_all()


def test_a_grown_allocator_hands_out_the_new_slots() -> None:
    allocator = SlotAllocator(4)
    assert allocator.allocate(4) == 0
    assert allocator.allocate(2) is None
    allocator.grow(3)
    allocator.check_integrity()
    assert (allocator.num_slots, allocator.num_free) == (7, 3)
    assert allocator.allocate(2) == 4
    allocator.grow(5)  # joins the free end: [6, 12)
    assert allocator.allocate(6) == 6
    allocator.free(0, 4)
    allocator.check_integrity()
    assert (allocator.num_used, allocator.num_free) == (8, 4)
    empty = SlotAllocator()
    empty.grow(1)
    assert empty.allocate(1) == 0


BAD = [
    ("fast_tokens", 0, "1 or more"),
    ("fast_tokens", 2.5, "a whole number"),
    ("fast_tokens", None, "a whole number"),
    ("fast_tokens", True, "a whole number"),
    ("host_tokens", -1, "0 or more"),
    ("host_tokens", "9", "a whole number"),
    ("sink_tokens", -1, "0 or more"),
    ("sink_tokens", 1.0, "a whole number"),
    ("recent_tokens", -1, "0 or more"),
    ("recent_tokens", None, "a whole number"),
    ("disk", "", "a folder, or null"),
    ("disk", 3, "a folder, or null"),
    ("disk", ["x"], "a folder, or null"),
    ("direct_io", 1, "true or false"),
    ("direct_io", None, "true or false"),
    ("prefetch", "orcle", "layer, none, oracle, recent"),
    ("prefetch", None, "layer, none, oracle, recent"),
    ("dense_layers", 3, "a list of layer numbers"),
    ("dense_layers", "01", "a list of layer numbers"),
    ("dense_layers", [-1], "0 or more"),
    ("dense_layers", [1.5], "a whole number"),
    ("dense_layers", [True], "a whole number"),
    ("link_gbps", 0, "a number from 1e-06 on"),
    ("link_gbps", -2.0, "a number from 1e-06 on"),
    ("link_gbps", float("nan"), "a number from 1e-06 on"),
    ("link_gbps", float("inf"), "a number from 1e-06 on"),
    ("link_gbps", "fast", "a number from 1e-06 on"),
    ("link_gbps", True, "a number from 1e-06 on"),
    ("link_latency_us", -0.1, "a number from 0 on"),
    ("link_latency_us", None, "a number from 0 on"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD)
def test_a_bad_setting_is_named(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OvalConfig.from_dict({"tiers": {"fast_tokens": 64, "disk": "/x", name: value}})
    message = str(caught.value)
    assert message.startswith(f"tiers.{name}: got ")
    assert f"Allowed: {allowed}." in message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"host_tokens": 8}, r"host_tokens: got 8 without a disk.*Allowed.*Name a folder"),
        ({"host_tokens": 0}, r"host_tokens: got 0 without a disk"),
        ({"direct_io": True}, r"direct_io: got true without a disk.*Name a folder"),
        ({"fast_token": 9}, r"'tiers\.fast_token': did you mean 'fast_tokens'\?"),
        ({"prefetch": "orcle"}, r"did you mean 'oracle'\?"),
    ],
)
def test_settings_that_do_not_go_together(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OvalConfig(tiers=values)


@pytest.mark.parametrize("tiers", [3, "disk", ["fast_tokens"], True])
def test_tiers_that_are_no_settings(tiers: Any) -> None:
    with pytest.raises(ConfigError, match=r"tiers: got .*Allowed: null, or settings"):
        OvalConfig(tiers=tiers)


@pytest.mark.parametrize("dense", [[3], [0, 1, 2], [0, 7]])
def test_dense_layers_must_leave_some(dense: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"dense_layers: got .*Allowed: some of 0\.\.2, not all"):
        TierTwin({"dense_layers": dense})


def test_round_trip_and_defaults_of_the_tiers() -> None:
    values = {"fast_tokens": 64, "disk": "/x", "host_tokens": 0, "dense_layers": [2, 0, 2]}
    config = OvalConfig(tiers=values)
    assert config.tiers.dense_layers == (0, 2)
    assert OvalConfig.from_dict(config.to_dict()) == config
    assert OvalConfig().tiers is None
    assert TierConfig.from_dict({}) == TierConfig()
    assert not TierConfig().is_modelled_link
    assert TierConfig(link_gbps=1).is_modelled_link
    assert TierConfig(link_latency_us=1).is_modelled_link
    for name in PREFETCH_NAMES:
        assert TierConfig(prefetch=name).prefetch == name
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.tiers.fast_tokens = 3
