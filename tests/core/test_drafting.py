"""Forwards of a draft read by another policy, and the cache is as before when they end."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from core.tree_twin import FACTS, TreeTwin, begin, partition, remembered

from oval_core.config import RoutingConfig
from oval_core.errors import CacheMismatchError, ConfigError
from oval_core.metrics import RoutingCounters
from oval_core.paged_cache import PagedCache
from oval_core.policy import FullPolicy
from oval_core.routing.registry import create_policy
from oval_core.routing.routed import RoutedPolicy
from oval_core.routing.window import WindowPolicy

ROUTING = {"token_budget": 24, "num_sink_tokens": 4, "window_size": 4, "router": "ema"}
TIERS = {"fast_tokens": 100, "sink_tokens": 4, "recent_tokens": 8}
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "routed": {"policy": "routed", "routing": ROUTING},
    "guarded": {"policy": "guarded", "routing": ROUTING},
    "cut": {"policy": "routed", "routing": {**ROUTING, "sizing": "attention_entropy"}},
    "tiers": {"policy": "routed", "routing": ROUTING, "tiers": {**TIERS, "fast_tokens": 100}},
    "windows": {"windows": (None, 3, None, 7)},
}


def filled(name: str, seed: int = 1) -> TreeTwin:
    twin = TreeTwin(seed, compares=False, **CASES[name])
    for _ in range(3):
        twin.prompt(20, 13)
        twin.step()
    return twin


def window(twin: TreeTwin) -> WindowPolicy:
    config = RoutingConfig(token_budget=20, num_sink_tokens=4, window_size=4)
    return WindowPolicy(config, twin.windows)


def draft(twin: TreeTwin, count: int, commit: bool = True) -> list[torch.Tensor]:
    cache, outs = twin.drafted, []
    begin(cache, [count] * twin.rows, count, None)
    for layer in range(FACTS.num_layers):
        cache.write(layer, twin.random(twin.rows, 2, count, 8), twin.random(twin.rows, 2, count, 8))
        query = twin.random(twin.rows, 4, count, 8)
        outs.append(cache.attend(layer, query, twin.spec(layer)))
    if commit:
        cache.commit(twin.random(twin.rows, count, FACTS.hidden_size))
    return outs


def state(cache: PagedCache) -> tuple[Any, ...]:
    totals = cache.counters.to_dict()
    return (
        partition(cache),
        {k: totals[k] for k in ("forwards", "tokens_written", "tokens_dropped", "peak_slots")},
        copy.copy(cache.policy._counters) if isinstance(cache.policy, RoutedPolicy) else None,
        cache.policy,
        cache.last_step,
    )


@pytest.mark.parametrize("name", CASES)
def test_a_draft_leaves_no_trace(name: str) -> None:
    twin = filled(name)
    cache = twin.drafted
    before, known = state(cache), [remembered(cache, row) for row in range(2)]
    with cache.drafting(window(twin)):
        for _ in range(5):
            draft(twin, 1)
        draft(twin, 9)
        assert [seq.length - len_of for seq, len_of in zip(
            cache.table.sequences, cache.draft_lengths or (), strict=True)] == [14, 14]  # fmt: skip
    assert state(cache)[1:] == before[1:]
    assert state(cache)[0] == before[0]
    for row in range(2):
        for key, value in remembered(cache, row).items():
            assert torch.equal(value, known[row][key]), key
    twin.check_text()
    twin.step()
    twin.prompt(1, 1)
    twin.check_text()


def test_a_draft_reads_by_its_own_policy() -> None:
    twin = filled("full")
    torch.manual_seed(0)
    states = twin.generator.get_state()
    with twin.drafted.drafting(window(twin)):
        part = draft(twin, 1)
    twin.generator.set_state(states)
    whole = draft(twin, 1, commit=False)
    twin.drafted.abort()
    assert torch.allclose(part[0], whole[0])
    assert not torch.allclose(part[3], whole[3])
    twin.check_text()


def test_a_routed_draft_takes_over_what_is_known() -> None:
    twin = filled("routed")
    policy, counters = twin.drafted.policy, RoutingCounters()
    assert isinstance(policy, RoutedPolicy)
    drafter = create_policy(twin.drafted.config, twin.windows, None, counters)
    assert isinstance(drafter, RoutedPolicy)
    drafter.take_over(policy)
    known = remembered(twin.drafted, 0)
    with twin.drafted.drafting(drafter):
        for _ in range(4):
            draft(twin, 1)
    assert counters.selections == 8
    for key, value in remembered(twin.drafted, 0).items():
        assert torch.equal(value, known[key]), key
    twin.check_text()


def test_an_error_or_an_open_forward_ends_a_draft_as_well() -> None:
    twin = filled("routed")
    before = state(twin.drafted)
    with twin.drafted.drafting(window(twin)):
        draft(twin, 2)
        draft(twin, 1, commit=False)
    assert state(twin.drafted) == before
    with contextlib.suppress(KeyboardInterrupt), twin.drafted.drafting(window(twin)):
        draft(twin, 2)
        raise KeyboardInterrupt
    assert state(twin.drafted) == before
    twin.check_text()


def test_what_is_not_allowed_is_said() -> None:
    twin = filled("full")
    cache = twin.drafted
    with cache.drafting(FullPolicy()):
        draft(twin, 1)
        for call in (
            lambda: cache.truncate([1, 1]),
            lambda: cache.reorder([0, 0]),
            lambda: cache.reset(),
            lambda: cache.clone(),
            lambda: cache.drafting(FullPolicy()).__enter__(),
        ):
            with pytest.raises(CacheMismatchError, match="while a draft runs"):
                call()
    with pytest.raises(ConfigError, match="the policy of the cache itself"):
        cache.drafting(cache.policy).__enter__()
    with pytest.raises(CacheMismatchError, match="empty cache"):
        twin.cache().drafting(FullPolicy()).__enter__()
    draft(twin, 1, commit=False)
    with pytest.raises(CacheMismatchError, match="runs or is held"):
        cache.drafting(FullPolicy()).__enter__()
    cache.abort()
    twin.check_text()
