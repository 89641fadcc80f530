"""What a router asks of a cache, checked before the cache is made."""

from __future__ import annotations

from typing import get_args

from oval_core.errors import ConfigError
from oval_core.routing.key_signals import SIGNALS
from oval_core.routing.router import FILLS_BY, PARTS, Lead, Router

_NEEDS_RECORDING = {"infllm"}
"""Signals whose summaries need the attention that each token of the prompt received."""


def router_signals(router: Router) -> set[str]:
    """Returns the signals that a router reads.

    Raises:
        ConfigError: it needs what no cache can tell it, or does not say what it needs, or when.
    """
    if not isinstance(router.needs, set | frozenset):
        raise ConfigError(
            f"routing.router: got {router.name!r} with needs {router.needs!r}. Allowed: a set of names. Give a frozenset."
        )
    names = set(router.needs - PARTS)
    if "filled_history" in router.needs:
        names.add(FILLS_BY)
    strange = names - (SIGNALS.keys() - _NEEDS_RECORDING)
    if strange:
        raise ConfigError(
            f"routing.router: got {router.name!r}, which needs {sorted(strange)}: no cache knows it while a "
            "model decodes. Allowed: the others; `oval bench recall` measures this one. Choose another."
        )
    if router.lead not in get_args(Lead) or (router.lead == "layer" and not names):
        raise ConfigError(
            f"routing.router: got {router.name!r} with lead {router.lead!r} and signals {sorted(names)}. Allowed: lead "
            "'step', or 'layer' with a signal, which alone knows the query of a layer. Mend the router."
        )
    return names
