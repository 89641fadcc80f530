"""Settings of the tests of selecting policies: a small budget, and tiers with little room."""

from __future__ import annotations

from typing import Any

from core.routed_world import RoutedWorld

from oval_core.tiers.fast_memory import _least_tokens

POLICIES = ("routed", "guarded")
SMALL: dict[str, Any] = {
    "router": "freekv",
    "token_budget": 24,
    "num_sink_tokens": 4,
    "window_size": 4,
    "layer_groups": 2,
    "dense_layers": (0,),
}
LITTLE_ROOM = {
    "fast_tokens": _least_tokens(3, 4) + 24,
    "sink_tokens": 0,
    "recent_tokens": 0,
    "dense_layers": (0,),
}


def small(**changes: Any) -> dict[str, Any]:
    return {**SMALL, **changes}


def left_out(world: RoutedWorld) -> int:
    return max((length - count for _, _, count, length in world.reads), default=0)
