"""Token trees on the paged cache: what each node reads, and that nodes that were not accepted leave no trace."""

from __future__ import annotations

import random

import pytest
import torch
from core.tree_twin import TreeTwin, partition, remembered
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_tree import RandomTree

from oval_core.native import unavailable_reason
from oval_core.routing.guarded import GuardedPolicy

TIERS = {"fast_tokens": 100, "sink_tokens": 4, "recent_tokens": 8}
ROUTING = {"token_budget": 4000, "num_sink_tokens": 4, "window_size": 4, "router": "ema"}


def run(twin: TreeTwin, steps: int, prompt: tuple[int, ...] = (11, 6)) -> None:
    twin.prompt(*prompt)
    for step in range(steps):
        twin.step()
        if step % 3 == 2:
            twin.prompt(1, 1)
    twin.check()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("backend", ["native", "reference", "sdpa", "torch"])
def test_each_node_sees_its_text_and_its_path(backend: str, page_size: int) -> None:
    if backend == "native" and unavailable_reason():
        pytest.skip("no compiler")
    run(TreeTwin(page_size, backend=backend, page_size=page_size), 6)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("backend", ["reference", "sdpa", "torch"])
def test_windows_count_depths_and_soft_caps_hold(backend: str, softcap: float | None) -> None:
    windows = (3, None, 7, 100)
    run(TreeTwin(3, backend=backend, windows=windows, softcap=softcap), 6)


@pytest.mark.parametrize("policy", ["full", "routed", "guarded"])
@pytest.mark.parametrize("backend", ["sdpa", "torch"])
def test_pages_that_are_streamed_are_merged(backend: str, policy: str) -> None:
    routing = {} if policy == "full" else {"policy": policy, "routing": ROUTING}
    twin = TreeTwin(4, backend=backend, tiers=TIERS, **routing)
    for _ in range(4):
        twin.prompt(20, 15)
    run(twin, 9)
    assert twin.drafted.tiers is not None
    assert twin.drafted.tiers.num_away > 0, "nothing was streamed"


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_selection_that_is_made_whole_by_each_query_loses_nothing(backend: str) -> None:
    routing = {**ROUTING, "token_budget": 24, "coverage": 1.0}
    twin = TreeTwin(5, backend=backend, policy="guarded", routing=routing)
    run(twin, 8, (60, 30))
    assert isinstance(twin.drafted.policy, GuardedPolicy)
    assert twin.drafted.policy._counters.selections > 0, "nothing was selected"


STATES = {
    "full": {},
    "small pages": {"page_size": 1},
    "windows": {"windows": (3, None, 7, None)},
    "routed": {"policy": "routed", "routing": ROUTING},
    "entropy": {"policy": "routed", "routing": {**ROUTING, "sizing": "attention_entropy"}},
    "keys": {"policy": "routed", "routing": {**ROUTING, "sizing": "key_similarity"}},
    "tiers": {"tiers": TIERS},
    "tiers routed": {"tiers": TIERS, "policy": "routed", "routing": ROUTING},
}


@pytest.mark.parametrize("name", STATES)
@given(st.integers(0, 1 << 30))
@settings(max_examples=8, deadline=None)
def test_rejected_nodes_leave_no_trace(name: str, seed: int) -> None:
    twin = TreeTwin(seed, compares=False, **STATES[name])
    twin.prompt(twin.rng.randint(1, 30), twin.rng.randint(1, 30))
    for _ in range(twin.rng.randint(1, 8)):
        action = twin.rng.choice(["tree", "tree", "abort", "token", "turn"])
        if action in ("tree", "abort"):
            twin.step(twin.rng.choice([3, 9, 20]), aborts=action == "abort")
        else:
            twin.prompt(*([1, 1] if action == "token" else [20, 5]))
    twin.check()


def branched() -> RandomTree:
    """Nine nodes, of which 0, 2, 5, 8 are a path."""
    tree = RandomTree(9, random.Random(0))
    tree.parents = [-1, 0, 0, 1, 1, 2, 2, 5, 5]
    return tree


def test_most_accepted_tokens_stay_in_their_slots() -> None:
    twin = TreeTwin(6, rows=1, page_size=16)
    twin.prompt(3)
    seq = twin.drafted.table.sequences[0]
    copied = twin.drafted.counters.slots_copied
    before = seq.token_slots()
    twin.forward([branched()], [[0, 2, 5, 8]], 9)
    assert seq.token_slots()[3:] == [before[-1] + 1 + place for place in (0, 2, 5, 8)]
    assert twin.drafted.counters.slots_copied == copied
    twin.check()


def test_a_page_is_filled_before_the_next_one_begins() -> None:
    twin = TreeTwin(7, rows=1, page_size=4)
    twin.prompt(3)
    twin.forward([branched()], [[0, 2, 5, 8]], 9)
    assert partition(twin.drafted) == [[([0, 1, 2, 3], True), ([4, 5, 6], False)]]
    twin.check()


def test_an_abort_restores_all() -> None:
    twin = TreeTwin(8, policy="routed", routing=ROUTING)
    run(twin, 4)
    before = partition(twin.drafted), remembered(twin.drafted, 0)
    twin.step(20, aborts=True)
    assert partition(twin.drafted) == before[0]
    for name, value in remembered(twin.drafted, 0).items():
        assert torch.equal(value, before[1][name]), name
    twin.step()
    twin.check()
