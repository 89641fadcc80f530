"""A small CLIP of the open_clip library: made by its classes, saved in its schema. Trains nothing.

Shapes: B pictures or texts, D of the joint space.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from oval_adapters.training.clip_settings import HEAD_WIDTH, ClipTraining
from oval_core.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["CONFIG_NAME", "WEIGHTS_NAME", "SmallClip", "create_clip", "open_clip_library"]

CONFIG_NAME = "open_clip_config.json"
WEIGHTS_NAME = "open_clip_model.safetensors"
"""The names that open_clip's `local-dir:` looks for."""


@dataclass(frozen=True, slots=True)
class SmallClip:
    """A model of open_clip with what goes in front of it.

    Attributes:
        model: `open_clip.CLIP`, float32.
        config: the arguments that it was made by, open_clip's `model_cfg`.
        preprocess: a picture to pixels [3, rows, columns].
        tokenizer: texts to ids [B, context length].
    """

    model: Any
    config: dict[str, Any]
    preprocess: Callable[[Image], torch.Tensor]
    tokenizer: Callable[[list[str]], torch.Tensor]

    @property
    def num_parameters(self) -> int:
        """How many weights there are."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def pictures(self, pictures: Sequence[Image]) -> torch.Tensor:
        """Returns embeddings [B, D] of length 1."""
        pixels = torch.stack([self.preprocess(picture) for picture in pictures])
        found: torch.Tensor = self.model.encode_image(pixels, normalize=True)
        return found

    def texts(self, texts: Sequence[str]) -> torch.Tensor:
        """Returns embeddings [B, D] of length 1."""
        found: torch.Tensor = self.model.encode_text(self.tokenizer(list(texts)), normalize=True)
        return found

    def save(self, folder: Path) -> int:
        """Writes the model so that `open_clip.create_model("local-dir:FOLDER")` loads it; returns the bytes of its weights.

        Raises:
            ConfigError: the folder cannot be written.
        """
        visual = self.model.visual
        # what follows from the model's own shape is not said twice: open_clip takes the size from it
        preprocess = {key: visual.preprocess_cfg[key] for key in ("mean", "std", "interpolation", "resize_mode")}  # fmt: skip
        config = {"model_cfg": self.config, "preprocess_cfg": preprocess}
        state = {name: tensor.detach().contiguous() for name, tensor in self.model.state_dict().items()}  # fmt: skip
        weights = folder / WEIGHTS_NAME
        try:
            # a name that open_clip takes for no weights, until they are whole
            partial = folder / f"{WEIGHTS_NAME}.partial"
            save_file(state, partial)
            partial.replace(weights)
            (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"out: cannot write to {folder}: {error.strerror}. Allowed: a writable folder. Name another one."
            ) from error
        return weights.stat().st_size


def open_clip_library() -> Any:
    """Returns the package open_clip.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec("open_clip") is None:
        raise ConfigError(
            "train clip: got no open_clip. Allowed: with the package open-clip-torch, whose model, loss and tokenizer these "
            "are. Install `oval-pack[clip]`."
        )
    return importlib.import_module("open_clip")


def create_clip(settings: ClipTraining) -> SmallClip:
    """Returns a new model, its weights drawn by the seed.

    Args:
        settings: its shape and the seed.

    Raises:
        ConfigError: open_clip is not installed.
    """
    library = open_clip_library()
    transform: Any = importlib.import_module("open_clip.transform")
    tokenizer = library.SimpleTokenizer(context_length=settings.context_length)
    config = _model_config(settings, tokenizer.vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = library.CLIP(**config)
    preprocess = transform.PreprocessCfg(size=settings.image_size)
    library.set_model_preprocess_cfg(model, asdict(preprocess))
    return SmallClip(
        model, config, transform.image_transform_v2(preprocess, is_train=False), tokenizer
    )


def _model_config(settings: ClipTraining, vocab_size: int) -> dict[str, Any]:
    return {
        "embed_dim": settings.embed_dim,
        "vision_cfg": {
            "image_size": settings.image_size,
            "patch_size": settings.patch,
            "width": settings.width,
            "layers": settings.layers,
            "head_width": HEAD_WIDTH,
        },
        "text_cfg": {
            "context_length": settings.context_length,
            "vocab_size": vocab_size,
            "width": settings.text_width,
            "heads": settings.text_width // HEAD_WIDTH,
            "layers": settings.text_layers,
        },
    }
