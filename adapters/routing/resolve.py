"""Finds the router for a model: by name, by folder, or the trained one that ships for it."""

from __future__ import annotations

import logging
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from oval_core.config import RoutingConfig
from oval_core.errors import ConfigError
from oval_core.routing.checkpoint import CONFIG_NAME, ModelFacts, TrainedRouter, load_router
from oval_core.routing.page_sizer import DynamicPageSizer
from oval_core.routing.registry import create_router, rivals_by_name
from oval_core.routing.router import Router
from oval_core.routing.sizing import DynamicSizing

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["model_facts", "resolve_router", "resolve_sizer", "shipped_routers"]

_log = logging.getLogger(__name__)
FALLBACK = "sketch"
"""What `auto` takes for a model that no router was trained for."""


def model_facts(config: PretrainedConfig) -> ModelFacts:
    """Returns what tells models apart for which a router may have been trained."""
    text = config.get_text_config(decoder=True)
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return ModelFacts(
        model_type=text.model_type,
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        num_kv_heads=kv_heads,
        vocab_size=text.vocab_size,
    )


def shipped_routers() -> dict[str, Path]:
    """Returns the folders of the trained routers that ship with OVAL, by name."""
    root = Path(str(resources.files("oval_adapters.assets"))) / "routers"
    if not root.is_dir():
        return {}
    return {path.parent.name: path.parent for path in sorted(root.glob(f"*/{CONFIG_NAME}"))}


def resolve_router(routing: RoutingConfig, model: PreTrainedModel) -> Router:
    """Returns the router that settings ask for, on the CPU.

    Raises:
        ConfigError: there is no such router, or it was trained for another model.
    """
    facts = model_facts(model.config)
    if routing.router != "auto":
        if routing.router in rivals_by_name():
            return create_router(routing.router)
        folder = shipped_routers().get(routing.router)
        if folder is None:
            create_router(routing.router)  # tells what is wrong with the name or the folder
            folder = Path(routing.router)
        trained = load_router(folder)
        _check(trained, facts, routing)
        return trained.router
    for name, folder in shipped_routers().items():
        trained = load_router(folder)
        if trained.model == facts and _fits(trained, routing, facts):
            _log.info("routing.router: auto took %r, trained for such a model", name)
            return trained.router
    _log.info("routing.router: auto took %r: no router ships for this model", FALLBACK)
    return create_router(FALLBACK)


def resolve_sizer(
    routing: RoutingConfig, model: PreTrainedModel, page_size: int
) -> DynamicPageSizer | None:
    """Returns what cuts pages under `sizing: dynamic`, on the CPU; None under another sizing.

    The one beside the router that settings name comes first, then one that ships for such a model; else an untrained one,
    which goes by the variance of hidden states alone.
    """
    if routing.sizing != DynamicSizing.name:
        return None
    facts = model_facts(model.config)
    folders = shipped_routers()
    named = folders.pop(routing.router, Path(routing.router))
    for folder in (named, *folders.values()):
        if not (folder / CONFIG_NAME).is_file():
            continue
        trained = load_router(folder)
        if trained.sizer is not None and trained.model in (None, facts):
            return trained.sizer
    _log.info("routing.sizing: dynamic takes an untrained sizer: none ships for this model")
    return DynamicPageSizer(facts.hidden_size, page_size)


def _fits(trained: TrainedRouter, routing: RoutingConfig, facts: ModelFacts) -> bool:
    return trained.router.config.num_groups == _num_groups(routing, facts)


def _num_groups(routing: RoutingConfig, facts: ModelFacts) -> int:
    return min(routing.layer_groups, facts.num_layers - len(routing.dense_layers))


def _check(trained: TrainedRouter, facts: ModelFacts, routing: RoutingConfig) -> None:
    if trained.model is not None and trained.model != facts:
        raise ConfigError(
            f"routing.router: {routing.router!r} was trained for {trained.model}. Got {facts}. Allowed: a router of this "
            "model. Train one with `oval train router`, or choose another by name."
        )
    groups = trained.router.config.num_groups
    if not _fits(trained, routing, facts):
        raise ConfigError(
            f"routing.layer_groups: got {routing.layer_groups}. Allowed with router {routing.router!r}: {groups}, as it "
            "was trained. Set layer_groups to that, or train another router."
        )
