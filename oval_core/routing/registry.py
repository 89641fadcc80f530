"""Routers and policies by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from oval_core.config import MAX_PAGE_SIZE, OvalConfig
from oval_core.errors import ConfigError, did_you_mean
from oval_core.metrics import RoutingCounters
from oval_core.policy import FullPolicy, SelectionPolicy
from oval_core.routing import rivals
from oval_core.routing.checkpoint import CONFIG_NAME, load_router
from oval_core.routing.guarded import GuardedPolicy
from oval_core.routing.routed import RoutedPolicy
from oval_core.routing.router import Router

_OWN: tuple[Callable[[], Router], ...] = (
    rivals.Persistence,
    rivals.Ema,
    rivals.Prr,
    rivals.H2o,
    rivals.Tova,
    rivals.SnapKv,
    rivals.Recency,
    rivals.Random,
)
MEASURED_ONLY = ("cross_layer", "infllm", "oracle_mass", "oracle_output", "snapkv")
"""Routers that need what only a recording knows: `oval bench recall` measures them, no model decodes with them."""


def rivals_by_name() -> dict[str, Router]:
    """Returns a new instance of every router that is not trained."""
    made = [create() for create in _OWN]
    return {router.name: router for router in [*made, *rivals.by_signal()]}


ROUTER_NAMES = tuple(sorted(rivals_by_name()))
"""Routers that need no training."""


def create_router(name: str) -> Router:
    """Returns the router of this name, or the trained one in this folder.

    Raises:
        ConfigError: there is neither.
    """
    routers = rivals_by_name()
    if name in routers:
        return routers[name]
    if (Path(name) / CONFIG_NAME).is_file():
        return load_router(name).router
    if Path(name).name != name or Path(name).exists():
        return load_router(name).router  # tells what the folder lacks
    decode = ["auto", *(known for known in ROUTER_NAMES if known not in MEASURED_ONLY)]
    raise ConfigError(
        f"routing.router: got {name!r}; {did_you_mean(name, decode)} Or the folder of a trained router."
    )


def create_policy(
    config: OvalConfig,
    windows: Sequence[int | None],
    router: Router | None = None,
    counters: RoutingCounters | None = None,
) -> SelectionPolicy:
    """Returns the policy of one cache.

    Args:
        config: settings.
        windows: sliding window of each decoder layer.
        router: in place of the one that the settings name.
        counters: totals to add to; None for new ones.
    Raises:
        ConfigError: the settings do not fit the layers, or the router cannot decode.
    """
    if config.policy == FullPolicy.name:
        return FullPolicy()
    policies = {RoutedPolicy.name: RoutedPolicy, GuardedPolicy.name: GuardedPolicy}
    assert config.routing is not None, "a policy that selects has settings"
    if router is None:
        name = config.routing.router
        router = create_router("sketch" if name == "auto" else name)
    made = counters if counters is not None else RoutingCounters()
    most = config.page_size if config.routing.sizing == "fixed" else MAX_PAGE_SIZE
    if config.vision is not None:
        most = max(most, config.vision.page_tokens)
    return policies[config.policy](config.routing, windows, router, made, most)
