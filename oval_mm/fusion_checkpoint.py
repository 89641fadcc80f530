"""Fusion routers on disk: `oval_fusion.safetensors` (weights), `oval_fusion.json` (shape, model, training)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from oval_core.errors import ConfigError
from oval_core.written_folder import read_facts
from oval_mm.fusion_router import FusionConfig, FusionRouter

__all__ = ["CONFIG_NAME", "WEIGHTS_NAME", "TrainedFusion", "load_fusion", "save_fusion"]

WEIGHTS_NAME = "oval_fusion.safetensors"
CONFIG_NAME = "oval_fusion.json"
_FORMAT = "oval-fusion-1"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedFusion:
    """A fusion router with where it comes from.

    Attributes:
        router: in evaluation mode.
        model: name or facts of the model that it was trained for; empty if unknown.
        training: command, data, seed and figures.
    """

    router: FusionRouter
    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)


def save_fusion(folder: str | Path, trained: TrainedFusion) -> None:
    """Writes both files; weights first, so that a folder with a config is whole."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = trained.router.state_dict()
    state = {name: weight.detach().cpu().contiguous() for name, weight in state.items()}
    save_file(state, folder / WEIGHTS_NAME)
    values = {
        "format": _FORMAT,
        "router": trained.router.config.to_dict(),
        "model": dict(trained.model),
        "training": dict(trained.training),
    }
    (folder / CONFIG_NAME).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def check_fusion(folder: str | Path) -> None:
    """Checks that a folder holds a router, by its config: weights are not read.

    Raises:
        ConfigError: it does not.
    """
    _facts(Path(folder).expanduser())


def load_fusion(folder: str | Path) -> TrainedFusion:
    """Reads what `save_fusion` wrote.

    Raises:
        ConfigError: a file is missing or is not what it should be.
    """
    folder = Path(folder).expanduser()
    values = _facts(folder)
    try:
        router = FusionRouter(FusionConfig.from_dict(values["router"]))
        router.load_state_dict(load_file(folder / WEIGHTS_NAME))
    except (OSError, SafetensorError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"fusion router {folder}: its files do not make a router ({error}). Allowed: {CONFIG_NAME} and {WEIGHTS_NAME} of "
            "one training. Copy both, or train it again."
        ) from error
    return TrainedFusion(
        router=router.eval(),
        model=values.get("model") or {},
        training=values.get("training") or {},
    )


def _facts(folder: Path) -> dict[str, Any]:
    return read_facts(
        folder, "fusion router", config=CONFIG_NAME, weights=WEIGHTS_NAME, form=_FORMAT
    )
