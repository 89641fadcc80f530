"""Every setting is checked at the door: what, got, allowed, and the nearest name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from oval_core.config import BACKEND_NAMES, POLICY_NAMES, OvalConfig
from oval_core.errors import ConfigError

BAD = [
    ("page_size", 0, "1..32"),
    ("page_size", 33, "1..32"),
    ("page_size", -1, "1..32"),
    ("page_size", 16.0, "a whole number"),
    ("page_size", "16", "a whole number"),
    ("page_size", True, "a whole number"),
    ("page_size", None, "a whole number"),
    ("policy", "ful", "full, guarded, routed"),
    ("policy", "", "full, guarded, routed"),
    ("policy", None, "full, guarded, routed"),
    ("policy", ["full"], "full, guarded, routed"),
    ("backend", "tourch", "auto, native, reference, sdpa, torch"),
    ("backend", 3, "auto, native, reference, sdpa, torch"),
    ("backend", None, "auto, native, reference, sdpa, torch"),
    ("reserve_tokens", 0, "1 or more"),
    ("reserve_tokens", -5, "1 or more"),
    ("reserve_tokens", 1.5, "a whole number"),
    ("reserve_tokens", False, "a whole number"),
    ("track_hidden", 1, "true or false"),
    ("track_hidden", "yes", "true or false"),
    ("track_hidden", None, "true or false"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD)
def test_a_bad_value_is_named(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OvalConfig.from_dict({name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}: got {value!r}")
    assert f"Allowed: {allowed}." in message
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("key", "near"),
    [("pagesize", "page_size"), ("backends", "backend"), ("reserve", "reserve_tokens")],
)
def test_an_unknown_key_gets_a_suggestion(key: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OvalConfig.from_dict({"page_size": 8, key: 8})
    message = str(caught.value)
    assert message.startswith(f"unknown config key {key!r}: did you mean {near!r}? Allowed: ")
    assert all(field.name in message for field in dataclasses.fields(OvalConfig))


@pytest.mark.parametrize("key", ["zzzz", 7, None])
def test_a_key_that_is_like_none_gets_the_list(key: Any) -> None:
    with pytest.raises(ConfigError, match=r"Allowed: backend, .*page_size") as caught:
        OvalConfig.from_dict({key: 1})
    assert "did you mean" not in str(caught.value)


def test_close_names_of_values_are_suggested() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'torch'\?"):
        OvalConfig(backend="tourch")


@pytest.mark.parametrize("page_size", [1, 32])
def test_limits_are_allowed(page_size: int) -> None:
    assert OvalConfig(page_size=page_size, reserve_tokens=1).page_size == page_size


def test_every_listed_name_is_allowed() -> None:
    for policy in POLICY_NAMES:
        for backend in BACKEND_NAMES:
            assert OvalConfig(policy=policy, backend=backend).backend == backend


def test_round_trip_and_defaults() -> None:
    config = OvalConfig(page_size=4, backend="sdpa", reserve_tokens=9, track_hidden=True)
    assert OvalConfig.from_dict(config.to_dict()) == config
    assert OvalConfig.from_dict({}) == OvalConfig()
    assert set(OvalConfig().to_dict()) == {field.name for field in dataclasses.fields(OvalConfig)}
    assert (OvalConfig().page_size, OvalConfig().policy) == (16, "full")


def test_a_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        OvalConfig().page_size = 8
    with pytest.raises(TypeError):
        OvalConfig(8)
