"""`full` reads every token of every row; policies are made by name, and only where they can route."""

from __future__ import annotations

import pytest

from oval_core.config import POLICY_NAMES, OvalConfig
from oval_core.errors import ConfigError
from oval_core.page_table import PageTable
from oval_core.policy import FullPolicy
from oval_core.routing.registry import MEASURED_ONLY, ROUTER_NAMES, create_policy


def test_full_reads_every_page_of_every_row() -> None:
    table = PageTable(4)
    table.open_sequences(3)
    table.make_room([4] * 10)
    table.append(0, 6)
    assert FullPolicy().select(table.sequences, [6, 0, 0]).groups == ()


def test_every_policy_name_of_the_config_can_be_made() -> None:
    made = [create_policy(OvalConfig(policy=name), [None] * 4).name for name in POLICY_NAMES]
    assert made == list(POLICY_NAMES)


@pytest.mark.parametrize(
    ("name", "hint"), [("fulll", "did you mean 'full'"), ("zz", "Allowed: full")]
)
def test_an_unknown_policy_is_refused(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"policy: got '{name}'; {hint}"):
        OvalConfig(policy=name)


@pytest.mark.parametrize("policy", ["routed", "guarded"])
@pytest.mark.parametrize("router", sorted(set(ROUTER_NAMES) - set(MEASURED_ONLY)))
def test_every_router_that_can_decode_makes_a_policy(policy: str, router: str) -> None:
    config = OvalConfig(policy=policy, routing={"router": router})
    assert create_policy(config, [None] * 4).name == policy


@pytest.mark.parametrize("router", MEASURED_ONLY)
def test_a_router_that_no_cache_can_feed_is_refused(router: str) -> None:
    config = OvalConfig(policy="routed", routing={"router": router})
    with pytest.raises(ConfigError, match="oval bench recall"):
        create_policy(config, [None] * 4)


@pytest.mark.parametrize(
    ("dense", "windows"),
    [((0, 1), [None, None]), ((7,), [None] * 4), ((), [8, 8]), ((0,), [None, 4])],
)
def test_no_layer_to_route_is_refused(dense: tuple[int, ...], windows: list[int | None]) -> None:
    config = OvalConfig(policy="routed", routing={"dense_layers": dense})
    with pytest.raises(ConfigError, match="routing.dense_layers"):
        create_policy(config, windows)


def test_settings_of_routing_need_a_policy_that_selects() -> None:
    with pytest.raises(ConfigError, match="routing: got settings with policy 'full'"):
        OvalConfig(routing={"token_budget": 64})
