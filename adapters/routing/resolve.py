"""Finds the router for a model: by name, by folder, or the trained one that ships for it."""

from __future__ import annotations

import logging
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from oval_adapters.families import decoder_family
from oval_core.config import RoutingConfig
from oval_core.errors import ConfigError
from oval_core.routing.article_router import OVALRouter
from oval_core.routing.checkpoint import CONFIG_NAME, ModelFacts, load_router
from oval_core.routing.layer_groups import layer_groups
from oval_core.routing.output_aware import OutputAwareRouter
from oval_core.routing.page_sizer import DynamicPageSizer
from oval_core.routing.registry import create_router, rivals_by_name
from oval_core.routing.router import Router
from oval_core.routing.sizing import DynamicSizing

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["check_router", "model_facts", "resolve_router", "resolve_sizer", "shipped_routers"]

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
    facts, groups = model_facts(model.config), _num_groups(routing, model.config)
    if routing.router != "auto":
        if routing.router in rivals_by_name():
            return create_router(routing.router)
        folder = shipped_routers().get(routing.router)
        if folder is None:
            folder = Path(routing.router).expanduser()
            create_router(str(folder))  # tells what is wrong with the name or the folder
        trained = load_router(folder)
        if trained.model is not None and trained.model != facts:
            raise ConfigError(
                f"routing.router: {routing.router!r} was trained for {trained.model}. Got {facts}. Allowed: a router of "
                "this model. Train one with `oval train router`, or choose another by name."
            )
        check_router(trained.router, routing, model.config)
        return trained.router
    for name, folder in shipped_routers().items():
        trained = load_router(folder)
        if trained.model != facts:
            continue
        made_for = trained.router.config.num_groups
        if made_for == groups:
            _log.info("routing.router: auto took %r, trained for such a model", name)
            return trained.router
        _log.warning(
            "routing.router: auto took %r, not the trained router %r: layer_groups and dense_layers make %d groups, and "
            "it was trained for %d",
            FALLBACK,
            name,
            groups,
            made_for,
        )
        return create_router(FALLBACK)
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


def check_router(router: Router, routing: RoutingConfig, config: PretrainedConfig) -> None:
    """Raises `ConfigError` where a router of this project was made for another model, or for other groups of layers."""
    size = config.get_text_config(decoder=True).hidden_size
    made_for = _hidden_size(router)
    if made_for not in (None, size):
        raise ConfigError(
            f"router {router.name!r}: got one made for hidden size {made_for}. Allowed with this model: {size}. Make or "
            "train one for it."
        )
    groups = _num_groups(routing, config)
    if isinstance(router, OutputAwareRouter) and router.config.num_groups != groups:
        raise ConfigError(
            f"routing.layer_groups: got {routing.layer_groups}, which makes {groups} with dense_layers "
            f"{list(routing.dense_layers)}. Allowed with this router: {router.config.num_groups}, as it was "
            "trained. Set layer_groups or dense_layers so that it comes out, or train another router."
        )


def _hidden_size(router: Router) -> int | None:
    """Returns the hidden size that a router was made for; None where it reads no hidden state, or nobody knows."""
    if isinstance(router, OutputAwareRouter):
        return router.config.hidden_size if router.config.content else None
    return router.mlp[0].in_features if isinstance(router, OVALRouter) else None


def _num_groups(routing: RoutingConfig, config: PretrainedConfig) -> int:
    windows = decoder_family(config).windows(config.get_text_config(decoder=True))
    return 1 + max(layer_groups(routing, windows).values())
