"""Trained routers on disk: `oval_adapter.safetensors` with the weights, `oval_config.json` with shape, model and training."""

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

WEIGHTS_NAME = "oval_adapter.safetensors"
CONFIG_NAME = "oval_config.json"
_FORMAT = "oval-router-1"


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
    """

    router: OutputAwareRouter
    model: ModelFacts | None = None
    training: Mapping[str, Any] = field(default_factory=dict)


def save_router(folder: str | Path, trained: TrainedRouter) -> None:
    """Writes both files; weights first, so that a folder with a config is whole."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: t.detach().cpu().contiguous() for name, t in trained.router.state_dict().items()}
    save_file(state, folder / WEIGHTS_NAME)
    facts = trained.model
    values = {
        "format": _FORMAT,
        "router": trained.router.config.to_dict(),
        "model": None if facts is None else {n: getattr(facts, n) for n in facts.__slots__},
        "training": dict(trained.training),
    }
    (folder / CONFIG_NAME).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def load_router(folder: str | Path) -> TrainedRouter:
    """Reads what `save_router` wrote.

    Raises:
        ConfigError: a file is missing or is not what it should be.
    """
    folder = Path(folder)
    values = _read_config(folder)
    router, model = _made(folder, values)
    try:
        state = load_file(folder / WEIGHTS_NAME)
        router.load_state_dict(state)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ConfigError(
            f"router {folder}: {WEIGHTS_NAME} cannot be read ({error}). Allowed: the weights that belong to "
            f"{CONFIG_NAME}. Train the router again, or copy both files."
        ) from error
    return TrainedRouter(router=router.eval(), model=model, training=values.get("training") or {})


def _made(folder: Path, values: Mapping[str, Any]) -> tuple[OutputAwareRouter, ModelFacts | None]:
    """Returns a router of the written shape, without its weights, and what it was trained for."""
    try:
        router = OutputAwareRouter(RouterConfig.from_dict(values["router"]))
        facts = values.get("model")
        return router, None if facts is None else ModelFacts(**facts)
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"router {folder}: got a {CONFIG_NAME} that describes no router ({error}). Allowed: what `oval train "
            "router` writes. Train the router again, or copy both files."
        ) from error


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"router {folder}: {CONFIG_NAME} cannot be read ({error}). Allowed: a folder with {CONFIG_NAME} and "
            f"{WEIGHTS_NAME}, as `oval train router` writes it. Name such a folder."
        ) from error
    if not isinstance(values, dict) or values.get("format") != _FORMAT:
        got = values.get("format") if isinstance(values, dict) else type(values).__name__
        raise ConfigError(
            f"router {folder}: got format {got!r}. Allowed: {_FORMAT!r}. Use a folder that this version wrote."
        )
    return values
