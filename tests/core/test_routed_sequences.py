"""Whatever is done to a cache in whatever order: what is read, measured and remembered is what a slow oracle says."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from core.routed_world import RoutedWorld, Shape
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oval_core.errors import FastMemoryError
from oval_core.routing.registry import MEASURED_ONLY, ROUTER_NAMES
from oval_core.tiers.fast_memory import _least_tokens

ROUTERS = sorted(set(ROUTER_NAMES) - set(MEASURED_ONLY))
MOST_TOKENS = 80
NUMBERS = st.lists(st.integers(0, 12), min_size=3, max_size=3)
STEPS = st.one_of(
    st.tuples(st.sampled_from(["decode", "decode", "draft", "draft", "text", "pieces"]), NUMBERS),
    st.tuples(st.sampled_from(["hidden", "bias", "abort", "fail", "truncate"]), NUMBERS),
    st.tuples(st.sampled_from(["reorder", "clone", "reset"]), NUMBERS),
)
PLACES = ("memory", "host", "disk", "spill")


@st.composite
def setups(draw: st.DrawFn) -> dict[str, Any]:
    page_size = draw(st.sampled_from([1, 3, 4, 8]))
    routing = {
        "router": draw(st.sampled_from(ROUTERS)),
        "token_budget": draw(st.integers(1, 40)),
        "num_sink_tokens": draw(st.integers(0, 6)),
        "window_size": draw(st.integers(1, 9)),
        "dense_layers": draw(st.sampled_from([(), (0,), (1, 2)])),
        "layer_groups": draw(st.integers(1, 3)),
        "lead": draw(st.sampled_from([1, 1, 4])),
        "coverage": draw(st.sampled_from([0.3, 0.8, 0.99, 1.0])),
        "max_queries": draw(st.sampled_from([2, 12, 16])),
        "audit_every": draw(st.sampled_from([None, 2])),
    }
    return {
        "policy": draw(st.sampled_from(["routed", "guarded"])),
        "page_size": page_size,
        "routing": routing,
        "shape": Shape(
            windows=draw(st.sampled_from([(None,) * 4, (None, 5, None, None)])),
            value_dim=draw(st.sampled_from([8, 8, 4])),
            softcap=draw(st.sampled_from([None, None, 3.0])),
        ),
        "backend": draw(st.sampled_from(["reference", "torch", "sdpa", "native"])),
        "place": draw(st.sampled_from(PLACES)),
        "room": draw(st.integers(0, 60)),
        "rows": draw(st.integers(1, 3)),
    }


def tiers_at(place: str, folder: str, page_size: int, room: int) -> dict[str, Any]:
    """Settings of three tiered layers with little room, in main memory, in a file, or in both."""
    fast = _least_tokens(3, page_size) + room
    tiers: dict[str, Any] = {"fast_tokens": fast, "sink_tokens": 0, "recent_tokens": 0}
    more = {
        "host": {},
        "disk": {"disk": folder},
        "spill": {"disk": folder, "host_tokens": 20},
    }[place]
    return {"tiers": {**tiers, "dense_layers": (0,), **more}}


def make_bias(world: RoutedWorld, count: int) -> torch.Tensor:
    """A mask [1, 1, N, L] with causal order, some keys gone and some weaker."""
    length = world.lengths[0] + count
    bias = torch.randn(1, 1, count, length)
    bias = bias.masked_fill(torch.rand(1, 1, count, length) < 0.2, torch.finfo(bias.dtype).min)
    later = torch.arange(length) > torch.arange(length - count, length)[:, None]
    return bias.masked_fill(later, float("-inf"))


def step(world: RoutedWorld, name: str, numbers: list[int], rows: int) -> None:
    now = len(world.rows)
    if name == "reset" or not now:
        if now:
            world.reset()
        world.forward([8 + n for n in numbers[:rows]])
        return
    counts = numbers[:now] + [1] * (now - len(numbers))
    if name == "reorder":
        world.reorder([n % now for n in numbers[: max(1, numbers[0] % 4)]])
        return
    if name == "truncate":
        cut = [
            0 if n == 0 else max(0, length - n)
            for n, length in zip(counts, world.lengths, strict=True)
        ]
        world.truncate(cut if numbers[0] % 2 else world.lengths[:1] + cut[1:])
        return
    if max(world.lengths) > MOST_TOKENS or not any(counts):
        return
    if name == "decode":
        for _ in range(3):
            world.forward([min(1, n) for n in counts])
    elif name in ("draft", "abort"):
        before = world.lengths
        world.forward(counts, commit=name == "draft")
        if name == "draft":
            kept = [(n + 1) // 2 for n in counts]
            world.truncate([length + n for length, n in zip(before, kept, strict=True)])
    elif name == "text":
        world.forward([3 * n for n in counts])
    elif name == "pieces":
        for _ in range(6):
            world.forward([4] * now)
    elif name == "hidden":
        counts = [n % 4 for n in counts]
        if any(counts):
            hidden = [torch.rand(length) < 0.4 if length else None for length in world.lengths]
            world.forward(counts, hidden=hidden)
    elif name == "bias":
        if now == 1 and not any(world.shape.windows):  # a mask says what a window sees too
            world.forward([1 + numbers[0] % 4], bias=make_bias(world, 1 + numbers[0] % 4))
    elif name == "fail":
        world.forward(counts, num_layers=1 + numbers[0] % 4)
    elif name == "clone":
        twin = world.clone()
        twin.forward([1] * now)
        twin.check()
        twin.cache.close()


def run(setup: dict[str, Any], steps: list[tuple[str, list[int]]], folder: str) -> RoutedWorld:
    torch.manual_seed(len(steps))
    where = (
        {}
        if setup["place"] == "memory"
        else tiers_at(setup["place"], folder, setup["page_size"], setup["room"])
    )
    names = ("policy", "page_size", "routing", "backend", "shape")
    world = RoutedWorld(**{name: setup[name] for name in names}, **where)
    try:
        for name, numbers in [
            ("reset", [9, 3, 6]),
            ("pieces", [1, 1, 1]),
            ("decode", [1, 1, 1]),
            *steps,
        ]:
            try:
                step(world, name, numbers, setup["rows"])
            except FastMemoryError:
                assert not world.cache.is_running
            if not world.cache.is_running:  # else it failed in the middle, and nobody said so yet
                world.check()
    finally:
        world.cache.close()
    return world


@settings(
    max_examples=16,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(setup=setups(), steps=st.lists(STEPS, min_size=4, max_size=10))
def test_any_sequence_of_operations(setup: dict[str, Any], steps: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(setup, steps, folder)


LIFE = [
    ("pieces", [1, 1, 1]),
    ("decode", [1, 1, 1]),
    ("draft", [3, 1, 2]),
    ("decode", [1, 0, 1]),
    ("hidden", [3, 1, 2]),
    ("draft", [11, 7, 0]),
    ("fail", [2, 2, 2]),
    ("reorder", [1, 0, 0]),
    ("decode", [1, 1, 1]),
    ("clone", [1, 1, 1]),
    ("abort", [2, 1, 1]),
    ("truncate", [9, 9, 9]),
    ("decode", [1, 1, 1]),
]


@pytest.mark.parametrize(
    ("policy", "router", "backend", "place"),
    [
        ("routed", "sketch", "torch", "memory"),
        ("guarded", "quest", "torch", "memory"),
        ("routed", "freekv", "native", "host"),
        ("guarded", "ema", "torch", "disk"),
        ("guarded", "quest", "sdpa", "spill"),
    ],
)
def test_a_long_life(policy: str, router: str, backend: str, place: str, tmp_path: Path) -> None:
    routing = {
        "router": router,
        "token_budget": 18,
        "num_sink_tokens": 3,
        "window_size": 4,
        "dense_layers": (0,),
        "layer_groups": 2,
        "coverage": 0.7,
    }
    setup = {
        "policy": policy,
        "page_size": 4,
        "routing": routing,
        "shape": Shape(),
        "backend": backend,
        "place": place,
        "room": 20,
        "rows": 2,
    }
    world = run(setup, LIFE, str(tmp_path))
    assert sum(count < length for _, _, count, length in world.reads) > 20
    assert world.most_away > 5 or place == "memory"
    if policy == "guarded" and place != "memory":
        assert world.streamed_on_demand > 10


def test_a_mask_over_a_selection() -> None:
    routing = {"router": "freekv", "token_budget": 18, "window_size": 4, "dense_layers": (0,)}
    setup = {"policy": "guarded", "page_size": 4, "routing": {**routing, "coverage": 0.6}}
    setup |= {"shape": Shape(), "backend": "torch", "place": "memory", "rows": 1}
    world = run(setup, [("bias", [0]), ("bias", [3]), ("bias", [0])], "")
    assert min(length - count for _, _, count, length in world.reads[-9:]) > 3
