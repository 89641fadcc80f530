"""Loads the CLIP that settings name: a folder or hub name of transformers, a folder of open_clip, or `open_clip:ARCHITECTURE[,WEIGHTS]`."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoTokenizer

from oval_adapters.clip.hf_clip import HfClipEmbedder
from oval_adapters.models import resolve_model
from oval_core.errors import ConfigError, UnsupportedModelError
from oval_mm.clip.embedder import ClipEmbedder
from oval_mm.clip.open_clip_model import OpenClipEmbedder

__all__ = ["OPEN_CLIP", "load_clip"]

OPEN_CLIP = "open_clip:"
LOCAL = "local-dir:"
"""What open_clip calls a folder of its own."""


def load_clip(name: str) -> ClipEmbedder:
    """Returns the CLIP of this name.

    Args:
        name: what `AutoModel.from_pretrained` takes, or `open_clip:ViT-B-32,weights` where weights are a tag or a file of
            that architecture; a folder with `open_clip_config.json`, or `open_clip:local-dir:FOLDER`, for a saved one.
    Raises:
        ConfigError: it cannot be loaded.
        UnsupportedModelError: it is no CLIP whose patches lie in the joint space.
    """
    if name.startswith(OPEN_CLIP):
        return _open_clip(name.removeprefix(OPEN_CLIP))
    folder = Path(name).expanduser()
    if (folder / "open_clip_config.json").is_file() and not (folder / "config.json").is_file():
        return _open_clip(f"{LOCAL}{folder}")
    try:
        path = resolve_model(name)
        config = AutoConfig.from_pretrained(path)
        if config.model_type != "clip":
            # told by kind, before gigabytes are read
            return HfClipEmbedder(_Named(config), None)
        processor = AutoImageProcessor.from_pretrained(path)
        return HfClipEmbedder(
            AutoModel.from_pretrained(path), AutoTokenizer.from_pretrained(path), processor
        )
    except UnsupportedModelError:
        raise
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"vision.clip: {name!r} cannot be loaded ({error}). Allowed: a CLIP of transformers, a folder of open_clip, or "
            f"{OPEN_CLIP}ARCHITECTURE[,WEIGHTS]. Name one that is there."
        ) from error


class _Named:
    """A config where a model would be: enough to be refused by name."""

    def __init__(self, config: Any) -> None:
        self.config = config


def _open_clip(name: str) -> OpenClipEmbedder:
    if importlib.util.find_spec("open_clip") is None:
        raise ConfigError(
            f"vision.clip: got {OPEN_CLIP}{name} without open_clip. Allowed: with the package open-clip-torch. Install "
            "`oval-pack[clip]`."
        )
    library: Any = importlib.import_module("open_clip")
    # a folder may have a comma in its name, and has its own weights
    architecture, _, weights = (name, "", "") if name.startswith(LOCAL) else name.partition(",")
    try:
        model, _, _ = library.create_model_and_transforms(architecture, pretrained=weights or None)
        tokenizer = library.get_tokenizer(architecture)
    except (RuntimeError, OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"vision.clip: open_clip cannot make {name!r} ({error}). Allowed: its architectures and weights "
            "(open_clip.list_pretrained()). Name one of them."
        ) from error
    return OpenClipEmbedder(model, tokenizer)
