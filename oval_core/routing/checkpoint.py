"""Trained routers on disk, a page sizer beside: `oval_adapter.safetensors` (weights), `oval_config.json` (shape, model, training)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from oval_core.errors import ConfigError
from oval_core.routing.output_aware import OutputAwareRouter, RouterConfig
from oval_core.routing.page_sizer import DynamicPageSizer
from oval_core.written_folder import read_facts

WEIGHTS_NAME = "oval_adapter.safetensors"
CONFIG_NAME = "oval_config.json"
_FORMAT = "oval-router-1"
_SIZER = "sizer."  # before the names of its weights


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What a router was trained for.

    Attributes:
        model_type: family of the decoder.
        hidden_size: its hidden size.
        num_layers: its layers.
        num_kv_heads: its KV heads.
        vocab_size: its vocabulary.
    """

    model_type: str
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRouter:
    """A router with where it comes from.

    Attributes:
        router: in evaluation mode.
        model: what it was trained for; None if that was not written down.
        training: command, data, seed and figures, as they were written.
        sizer: what cuts pages for the same model, in evaluation mode; None if none was trained.
    """

    router: OutputAwareRouter
    model: ModelFacts | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    sizer: DynamicPageSizer | None = None


def save_router(folder: str | Path, trained: TrainedRouter) -> None:
    """Writes both files; weights first, so that a folder with a config is whole."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state, sizer = dict(trained.router.state_dict()), trained.sizer
    if sizer is not None:
        state |= {f"{_SIZER}{name}": weight for name, weight in sizer.state_dict().items()}
    state = {name: weight.detach().cpu().contiguous() for name, weight in state.items()}
    save_file(state, folder / WEIGHTS_NAME)
    facts = trained.model
    values = {
        "format": _FORMAT,
        "router": trained.router.config.to_dict(),
        "model": None if facts is None else {n: getattr(facts, n) for n in facts.__slots__},
        "training": dict(trained.training),
    }
    if sizer is not None:
        values["sizer"] = {"hidden_size": sizer.head.in_features, "mean_size": sizer.mean_size}
    (folder / CONFIG_NAME).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def load_router(folder: str | Path) -> TrainedRouter:
    """Reads what `save_router` wrote.

    Raises:
        ConfigError: a file is missing or is not what it should be.
    """
    folder = Path(folder)
    values = read_facts(
        folder,
        "router",
        config=CONFIG_NAME,
        weights=WEIGHTS_NAME,
        form=_FORMAT,
        written_by="oval train router",
    )
    router, model, sizer = _made(folder, values)
    try:
        state = load_file(folder / WEIGHTS_NAME)
        own = {name: state.pop(name) for name in list(state) if name.startswith(_SIZER)}
        router.load_state_dict(state)
        if sizer is not None:
            sizer.load_state_dict({n.removeprefix(_SIZER): weight for n, weight in own.items()})
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ConfigError(
            f"router {folder}: {WEIGHTS_NAME} cannot be read ({error}). Allowed: the weights that belong to "
            f"{CONFIG_NAME}. Train the router again, or copy both files."
        ) from error
    return TrainedRouter(
        router=router.eval(),
        model=model,
        training=values.get("training") or {},
        sizer=None if sizer is None else sizer.eval(),
    )


def _made(
    folder: Path, values: Mapping[str, Any]
) -> tuple[OutputAwareRouter, ModelFacts | None, DynamicPageSizer | None]:
    """Returns router and sizer of the written shapes, without their weights, and what they were trained for."""
    try:
        router = OutputAwareRouter(RouterConfig.from_dict(values["router"]))
        facts, shape = values.get("model"), values.get("sizer")
        model = None if facts is None else ModelFacts(**facts)
        return router, model, None if shape is None else DynamicPageSizer(**shape)
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"router {folder}: got a {CONFIG_NAME} that describes no router ({error}). Allowed: what `oval train "
            "router` writes. Train the router again, or copy both files."
        ) from error
