"""Who competes: routers by name, from folders, and the one that ships for a model, each under a name for the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oval_adapters.bench.recall_values import ALL, AUTO, RecallSettings
from oval_adapters.routing.resolve import resolve_router, shipped_routers
from oval_core.routing.output_aware import OutputAwareRouter
from oval_core.routing.registry import MEASURED_ONLY, ROUTER_NAMES, create_router
from oval_core.routing.router import Router

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_GUARDED = ("sketch",)
"""Measured under `guarded` too, beside trained routers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One router.

    Attributes:
        signal: its name in the tables.
        create: makes one with a new seed where it draws.
        is_late: whether it needs the layer's own query.
        is_trained: whether it was trained.
        can_decode: whether a model can decode with it.
    """

    signal: str
    create: Callable[[], Router]
    is_late: bool
    is_trained: bool
    can_decode: bool

    def leads(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the leads to measure: 0 alone for a router that chooses at every step."""
        return (0,) if self.is_late else wanted

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies that it decodes under."""
        if not self.can_decode:
            return ()
        guarded = self.is_trained or self.signal in _GUARDED
        return ("routed", "guarded") if guarded else ("routed",)


def check_routers(settings: RecallSettings) -> None:
    """Raises `ConfigError` where a name is no router and no folder with one, before a model is loaded."""
    for name in settings.routers:
        if name not in (ALL, AUTO) and name not in shipped_routers():
            create_router(name)


def contenders(settings: RecallSettings, model: PreTrainedModel) -> list[Contender]:
    """Returns the routers that the settings name, each once.

    Raises:
        ConfigError: there is no such router, or it was trained for another model or other groups of layers.
    """
    found: dict[str, Contender] = {}
    for name in settings.routers:
        if name in (ALL, AUTO):
            if name == ALL:
                found |= {known: _by_name(known) for known in ROUTER_NAMES}
            own = resolve_router(settings.routing(1.0, router=AUTO), model)
            if isinstance(own, OutputAwareRouter):
                found[own.name] = _trained(own.name, own)
            else:
                found[own.name] = _by_name(own.name)
        elif name in ROUTER_NAMES:
            found[name] = _by_name(name)
        else:
            router = resolve_router(settings.routing(1.0, router=name), model)
            found[name] = _trained(_label(name, settings), router)
    return list(found.values())


def _label(name: str, settings: RecallSettings) -> str:
    """Returns the folder's own name, where no other router has the same."""
    names = Counter([Path(other).name for other in settings.routers] + list(ROUTER_NAMES))
    return name if names[Path(name).name] > 1 else Path(name).name


def _by_name(name: str) -> Contender:
    return Contender(
        signal=name,
        create=lambda: create_router(name),
        is_late=create_router(name).lead == "layer",
        is_trained=False,
        can_decode=name not in MEASURED_ONLY,
    )


def _trained(label: str, router: Router) -> Contender:
    return Contender(
        signal=label,
        create=lambda: router,
        is_late=router.lead == "layer",
        is_trained=True,
        can_decode=True,
    )
