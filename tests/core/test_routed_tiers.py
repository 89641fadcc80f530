"""Selections over tiers: what is away comes when it is asked for, and what is chosen comes back."""

from __future__ import annotations

from typing import Any

import pytest
from core.routed_settings import LITTLE_ROOM, POLICIES, left_out, small
from core.routed_world import RoutedWorld

from oval_core.errors import TierError


@pytest.mark.parametrize("router", ["quest", "freekv"])
@pytest.mark.parametrize("where", ["host", "disk"])
def test_repairs_of_pages_that_are_away(router: str, where: str, tmp_path: Any) -> None:
    tiers = {**LITTLE_ROOM, **({} if where == "host" else {"disk": str(tmp_path)})}
    world = RoutedWorld(policy="guarded", routing=small(router=router, coverage=0.95), tiers=tiers)
    for _ in range(9):
        world.forward([8])
    for count in (1, 1, 3, 1, 2):
        world.forward([count])
    assert world.streamed_on_demand > 10
    assert left_out(world) > 3
    world.check()
    world.cache.close()


def test_what_is_never_read_ahead_comes_on_demand() -> None:
    """A router by layer, nothing to prefetch: the first transfer of a forward is one that `missed` asks for."""
    routing = small(router="quest", token_budget=20, window_size=2, num_sink_tokens=0)
    world = RoutedWorld(routing=routing, tiers=LITTLE_ROOM)
    for _ in range(9):
        world.forward([8])
    world.forward([1])
    demanded = world.cache.counters.tiers.bytes_demanded
    world.forward([1])
    assert world.cache.counters.tiers.bytes_demanded > demanded
    assert world.streamed_on_demand
    world.cache.close()


def test_chosen_pages_come_back_into_fast_memory() -> None:
    """The recency router changes nothing; a router by mass brings back what it wants."""
    world = RoutedWorld(routing=small(router="ema", token_budget=24), tiers=LITTLE_ROOM)
    for _ in range(9):
        world.forward([8])
    for _ in range(6):
        world.forward([1])
    chosen = world.policy.foresee(world.cache.table.sequences)
    wanted = {page.page_id for rows in chosen.groups for own in rows for page in own}
    away = [i for i in wanted if i not in world.cache.tiers.residency]
    assert world.cache.counters.tiers.bytes_loaded
    assert not away, "there is room for all that is chosen"
    world.check()
    world.cache.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_that_share_a_source_read_their_own_keys(policy: str) -> None:
    """Dense forwards of a batch over tiers: one row's keys must not be taken for the next one's."""
    world = RoutedWorld(policy=policy, routing=small(token_budget=400), tiers=LITTLE_ROOM)
    for _ in range(7):
        world.forward([4, 4, 4])
    world.reorder([2, 0, 0])
    world.forward([4, 1, 2])
    world.check()
    assert world.most_away
    world.cache.close()


@pytest.mark.parametrize("method", ["read_page", "store"])
def test_a_page_that_cannot_come_back_fails_no_forward(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bringing back is for speed only: the tokens are committed already."""
    world = RoutedWorld(routing=small(router="ema", token_budget=24), tiers=LITTLE_ROOM)
    for _ in range(9):
        world.forward([8])

    tiers, calls = world.cache.tiers, []
    end_forward, works = tiers.end_forward, getattr(tiers.slow, method)

    def broken(*args: Any) -> None:
        calls.append(args)
        raise TierError("the disk is gone")

    def end(foreseen: Any) -> Any:
        monkeypatch.setattr(tiers.slow, method, broken)
        try:
            return end_forward(foreseen)
        finally:
            monkeypatch.setattr(tiers.slow, method, works)

    monkeypatch.setattr(tiers, "end_forward", end)
    for _ in range(4):
        world.forward([1])
        world.check()
    assert calls
    world.cache.close()
