"""Offloading on equals offloading off, whatever is done to a cache in whatever order: bits, pages and totals."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
from core.tier_twin import FACTS, TierTwin, check_buffers, random_masks, stream_of, wait_idle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oval_core.config import PREFETCH_NAMES
from oval_core.errors import FastMemoryError
from oval_core.tiers.fast_memory import _least_tokens

MOST_TOKENS = 90

COUNTS = st.lists(st.integers(0, 9), min_size=4, max_size=4)
STEPS = st.one_of(
    st.tuples(st.sampled_from(["forward", "forward", "abort", "hidden"]), COUNTS),
    st.tuples(st.just("decode"), st.lists(st.integers(0, 1), min_size=4, max_size=4)),
    st.tuples(st.just("chunks"), st.just([8, 8, 8, 8])),
    st.tuples(st.just("window"), st.lists(st.integers(1, 30), min_size=4, max_size=4)),
    st.tuples(st.just("truncate"), st.lists(st.integers(0, 12), min_size=4, max_size=4)),
    st.tuples(st.just("reorder"), st.lists(st.integers(0, 3), min_size=1, max_size=4)),
    st.tuples(st.sampled_from(["reset", "clone"]), st.just([])),
)


@st.composite
def setups(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of a cache that holds little; `where` is filled in by the test."""
    page_size = draw(st.sampled_from([1, 3, 4, 8]))
    dense = draw(st.sampled_from([(), (), (0,), (1,)]))
    least = _least_tokens(FACTS.num_layers - len(dense), page_size)
    tiers = {
        "fast_tokens": least + draw(st.integers(0, 48)),
        "prefetch": draw(st.sampled_from(PREFETCH_NAMES)),
        "dense_layers": dense,
        "sink_tokens": draw(st.sampled_from([0, 4, 16])),
        "recent_tokens": draw(st.sampled_from([0, 8, 64])),
    }
    where = draw(st.sampled_from(["host", "disk", "spill", "direct"]))
    return {
        "tiers": tiers,
        "where": where,
        "page_size": page_size,
        "has_windows": draw(st.booleans()),
        "rows": draw(st.integers(1, 4)),
    }


def place(where: str, folder: str) -> dict[str, Any]:
    """Settings for main memory, a file, main memory that spills, or a file past the page cache."""
    return {
        "host": {},
        "disk": {"disk": folder},
        "spill": {"disk": folder, "host_tokens": 20},
        "direct": {"disk": folder, "direct_io": True},
    }[where]


def step(twin: TierTwin, name: str, numbers: list[int], rows: int, windowed: bool) -> None:
    now = len(twin.keys) or rows
    counts = numbers[:now]
    if name in ("forward", "abort", "hidden", "window", "decode", "chunks"):
        window = None
        if name == "window":
            window, counts = (counts[0] if windowed else None), [1 + n % 3 for n in counts]
        if not twin.keys:
            counts, name = [max(1, n) for n in counts] + [1] * (now - len(counts)), "forward"
        if max(twin.lengths, default=0) > MOST_TOKENS or not any(counts):
            return
        masks = random_masks(twin) if name == "hidden" else None
        for _ in range(3 if name in ("decode", "chunks") else 1):
            twin.try_forward(counts, window=window, hidden_keys=masks, commit=name != "abort")
    elif name == "reset":
        twin.reset()
    elif twin.keys:
        try:
            if name == "truncate":
                cuts = zip(twin.lengths, numbers, strict=False)
                twin.truncate([max(0, length - n) for length, n in cuts])
            elif name == "reorder":
                twin.reorder([row % now for row in numbers])
        except FastMemoryError:
            assert not twin.cache.is_running


def check_clone(twin: TierTwin) -> None:
    """A clone is equal, takes a way of its own, and takes nothing with it when it ends."""
    fork = copy.copy(twin)
    fork.cache = twin.cache.clone()
    fork.keys, fork.values = [list(k) for k in twin.keys], [list(v) for v in twin.values]
    fork.hidden = list(twin.hidden)
    fork.check_all(others=[twin.cache])
    if fork.keys:
        fork.try_forward([2] * len(fork.keys))
    fork.check_all(others=[twin.cache])
    fork.cache.close()


def run(setup: dict[str, Any], steps: list[tuple[str, list[int]]], folder: str) -> int:
    """Returns how many pages were away at most."""
    torch.manual_seed(len(steps))
    tiers = {**setup["tiers"], **place(setup["where"], folder)}
    twin = TierTwin(tiers, page_size=setup["page_size"], has_windows=setup["has_windows"])
    most = 0
    try:
        for name, numbers in [("forward", [9, 7, 8, 9]), *steps]:
            step(twin, name, numbers, setup["rows"], setup["has_windows"])
            twin.check_all()
            most = max(most, twin.cache.tiers.num_away)
            if name == "clone":
                check_clone(twin)
            if name == "reset":
                assert twin.cache.tiers.slow.bytes_waiting == 0
        if twin.cache.tiers.slow._stream is not None:
            check_buffers(twin.cache)
    finally:
        twin.cache.close()
    totals = twin.cache.counters.tiers
    assert twin.cache.tiers.slow.bytes_waiting == 0
    assert totals.bytes_used + totals.bytes_wasted == totals.bytes_prefetched
    return most


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(setup=setups(), steps=st.lists(STEPS, min_size=4, max_size=12))
def test_any_sequence_of_operations(setup: dict[str, Any], steps: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(setup, steps, folder)


FIXED = [
    ("forward", [9, 9, 9, 9]),
    ("chunks", [8, 8, 8, 8]),
    ("chunks", [8, 8, 8, 8]),
    ("decode", [1, 1, 1, 1]),
    ("reorder", [1, 0, 3, 2]),
    ("decode", [1, 0, 1, 1]),
    ("hidden", [3, 1, 2, 2]),
    ("window", [7, 7, 7, 7]),
    ("clone", []),
    ("abort", [5, 5, 5, 5]),
    ("reorder", [0, 0, 1]),
    ("truncate", [11, 2, 7]),
    ("decode", [1, 1, 1]),
    ("truncate", [30, 30, 30]),
    ("chunks", [8, 8, 8]),
    ("reset", []),
    ("forward", [9, 9, 9, 9]),
    ("chunks", [8, 8, 8, 8]),
    ("decode", [1, 1, 1, 1]),
]


@pytest.mark.parametrize(
    ("where", "prefetch"),
    [
        *(("host", name) for name in PREFETCH_NAMES),
        ("disk", "oracle"),
        ("spill", "layer"),
        ("spill", "oracle"),
        ("direct", "recent"),
    ],
)
def test_a_long_life(where: str, prefetch: str, tmp_path: Any) -> None:
    tiers = {"fast_tokens": 90, "prefetch": prefetch, "sink_tokens": 4, "recent_tokens": 8}
    setup = {"tiers": tiers, "where": where, "page_size": 4, "has_windows": True, "rows": 4}
    assert run(setup, FIXED, str(tmp_path)) > 20


@pytest.mark.parametrize("lengths", [[24, 24], [27, 27]])
@pytest.mark.parametrize("rows", [[1, 0], [1]])
def test_rows_that_change_places_while_no_page_moves(lengths: list[int], rows: list[int]) -> None:
    """A plan remembered for a row must not be used for another row that looks alike."""
    twin = TierTwin({"fast_tokens": 64, "sink_tokens": 0, "recent_tokens": 0})
    for _ in range(3):
        twin.forward([length // 3 for length in lengths])
    twin.forward([1, 1])
    assert twin.cache.tiers.num_away
    twin.reorder(rows)
    twin.forward([1] * len(rows))
    twin.check_all()


@pytest.mark.parametrize("host_tokens", [4, 12, 16, 24])
def test_batches_that_lie_in_main_memory_and_on_disk_at_once(
    host_tokens: int, tmp_path: Any
) -> None:
    twin = TierTwin({"fast_tokens": 128, "disk": str(tmp_path), "host_tokens": host_tokens})
    twin.fill(pages=12)
    store = twin.cache.tiers.slow._store
    assert store._disk.bytes_stored
    assert store._host.bytes_stored
    twin.forward([1])
    twin.check_all()


@pytest.mark.parametrize("queries", [1, 3])
def test_layers_with_a_window_fetch_only_what_they_see(queries: int) -> None:
    windows: list[int | None] = [1] * FACTS.num_layers
    twin = TierTwin(
        {"fast_tokens": 64, "sink_tokens": 64, "recent_tokens": 0, "prefetch": "none"},
        windows=windows,
    )
    for _ in range(10):
        twin.forward([8], window=1)
    missed = []
    for window in range(1, 60):
        windows[:] = [window] * FACTS.num_layers
        twin.forward([queries], window=window, commit=False)  # every distance to every batch
        missed.append(sum(twin.cache.last_step.misses.values()))
    assert missed[0] == 0
    assert 0 < missed[20] < twin.cache.tiers.num_away * FACTS.num_layers
    twin.check_all()


def commit_places(twin: TierTwin, count: int, places: list[int]) -> None:
    """A forward of one row of which a token tree accepts some places: the table's own call."""
    twin.begin([count])
    kept = torch.tensor(places)
    for layer in range(FACTS.num_layers):
        keys, values = twin.random_kv(1, count)
        twin.cache.write(layer, keys, values)
        twin.keys[0][layer] = torch.cat([twin.keys[0][layer], keys[0][:, kept]], 1)
        twin.values[0][layer] = torch.cat([twin.values[0][layer], values[0][:, kept]], 1)
    twin.cache.table.commit(0, places)
    twin.cache.table.sequences[0].num_committed = twin.cache.table.sequences[0].length
    twin.cache._memory.settle()
    twin.cache._end_forward(None)


def test_pages_whose_slots_are_out_of_order() -> None:
    """The vacant slots between accepted tokens are taken by the next ones."""
    twin = TierTwin(
        {"fast_tokens": 100, "sink_tokens": 0, "recent_tokens": 0}, has_windows=True, page_size=8
    )
    twin.forward([3])
    for round_ in range(24):
        commit_places(twin, 6, [1, 3, 4] if round_ % 2 else [0, 2, 5])
        twin.forward([2], window=(None, 5, 30, 70)[round_ % 4])
        twin.check_all()
    pages = twin.cache.table.sequences[0].pages
    lost = [page for page in pages if page.slots != sorted(page.slots)]
    assert any(page.page_id not in twin.cache.tiers.residency for page in lost)
    twin.forward([3], hidden_keys=random_masks(twin))
    twin.truncate([lost[0].tokens[-1]])
    twin.forward([3], window=9)
    twin.check_all()


def forward_images(twin: TierTwin, groups: list[list[int]]) -> None:
    """`begin` takes text only, so the table's two calls are bent to image pages for one forward."""
    table = twin.cache.table
    table.text_regions = lambda row, count: [len(group) for group in groups]
    table.append = lambda row, count: table.append_sets(row, groups)
    try:
        twin.forward([sum(map(len, groups))] * (len(twin.keys) or 1))
    finally:
        del table.text_regions, table.append


def test_images_among_the_text() -> None:
    twin = TierTwin({"fast_tokens": 100, "sink_tokens": 0, "recent_tokens": 0})
    for _ in range(6):
        twin.forward([3, 8])
        forward_images(twin, [[0, 2, 4, 6, 8], [1, 3], [5, 7]])
        twin.forward([1, 1])
        twin.check_all()
    assert twin.cache.tiers.num_away
    twin.reorder([1, 0, 0])
    twin.truncate([30, 41, 18])
    twin.forward([2, 1, 1])
    twin.check_all()


def test_a_page_that_was_fetched_ahead_and_then_cut_is_fetched_anew() -> None:
    """It stays sealed, so it may leave again before it is read: the old bytes must not be taken."""
    twin = TierTwin({"fast_tokens": 96, "sink_tokens": 0, "recent_tokens": 0})
    while twin.cache.tiers.num_away != 2:
        forward_images(twin, [list(range(8))])
    wait_idle(twin.cache)
    page = twin.cache.table.sequences[0].pages[1]
    assert any(key[1][-1] == page.page_id for key in stream_of(twin.cache)._ahead)
    twin.truncate([page.tokens[5]])
    twin.forward([twin.cache.tiers.memory.pool_slots])
    assert page.page_id not in twin.cache.tiers.residency
    twin.check_all()


def test_a_row_without_tokens_is_empty() -> None:
    twin = TierTwin({"fast_tokens": 64}).fill()
    twin.truncate([0])
    twin.check_all()
    twin.forward([8])
    twin.check_all()
