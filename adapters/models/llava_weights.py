"""What training gives a small LLaVA, in a folder: projector and low-rank additions, and how they were made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oval_core.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = [
    "CONFIG_NAME",
    "WEIGHTS_NAME",
    "LlavaWeights",
    "load_llava_weights",
    "save_llava_weights",
    "shipped_folder",
]

WEIGHTS_NAME = "oval_llava.safetensors"
CONFIG_NAME = "oval_llava.json"
FORMAT = "oval-llava-1"
_PROJECTOR, _LORA, _FEATURES = "projector.", "lora.", "features."


@dataclass(frozen=True, kw_only=True, slots=True)
class LlavaWeights:
    """Trained weights. D vision size, C text size.

    Attributes:
        projector: of `LlavaMultiModalProjector`, by its names: it reads the tower's raw hidden states.
        lora: additions to the decoder, see `lora_tensors`; empty where only the projector was trained.
        scale: of the additions.
        mean: of the tower's hidden states in training, [D]; training goes on in standardised ones.
        std: of the same, [D].
        side: pixels a side of the pictures.
        base: names of the models they belong to, and what else tells them apart.
        training: how they were made.
    """

    projector: Mapping[str, torch.Tensor]
    lora: Mapping[str, torch.Tensor]
    scale: float
    mean: torch.Tensor
    std: torch.Tensor
    side: int
    base: Mapping[str, Any]
    training: Mapping[str, Any]


def shipped_folder(name: str) -> Path:
    """Returns where the weights of a model lie that ship with OVAL; it may hold none."""
    return Path(str(resources.files("oval_adapters.assets"))) / "llava" / name


def save_llava_weights(folder: Path, weights: LlavaWeights) -> int:
    """Writes weights in bfloat16 (the statistics in float32), and their facts; returns the bytes of the weights.

    Raises:
        ConfigError: the folder cannot be written.
    """
    import torch
    from safetensors.torch import save_file

    parts = {_PROJECTOR: weights.projector, _LORA: weights.lora}
    tensors = {
        start + name: tensor.detach().to(torch.bfloat16).contiguous()
        for start, part in parts.items()
        for name, tensor in part.items()
    }
    tensors |= {
        f"{_FEATURES}{name}": tensor.detach().float().contiguous()
        for name, tensor in (("mean", weights.mean), ("std", weights.std))
    }
    facts = {"format": FORMAT, "base": dict(weights.base), "side": weights.side, "scale": weights.scale, "training": dict(weights.training)}  # fmt: skip
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{WEIGHTS_NAME}.partial"
        save_file(tensors, partial)
        partial.chmod(0o644)
        partial.replace(folder / WEIGHTS_NAME)
        (folder / CONFIG_NAME).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"out: cannot write to {folder}: {error.strerror}. Allowed: a writable folder. Name another one."
        ) from error
    return (folder / WEIGHTS_NAME).stat().st_size


def load_llava_weights(folder: Path) -> LlavaWeights:
    """Reads what `save_llava_weights` wrote.

    Raises:
        ConfigError: there are no such weights, or they are damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        facts = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS_NAME)
        if facts["format"] != FORMAT:
            raise ValueError(f"format {facts['format']!r}, expected {FORMAT!r}")
        return LlavaWeights(
            projector=_part(tensors, _PROJECTOR),
            lora=_part(tensors, _LORA),
            scale=float(facts["scale"]),
            mean=tensors[f"{_FEATURES}mean"],
            std=tensors[f"{_FEATURES}std"],
            side=int(facts["side"]),
            base=facts["base"],
            training=facts["training"],
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(
            f"weights: {folder} holds no trained projector that can be read ({error}). Allowed: a folder with "
            f"{WEIGHTS_NAME} and {CONFIG_NAME}. Train one: oval train llava"
        ) from error


def _part(tensors: Mapping[str, torch.Tensor], start: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}
