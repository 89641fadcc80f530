"""Loads the CLIP that settings name: a folder or hub name of transformers, a folder of open_clip, or `open_clip:ARCHITECTURE[,WEIGHTS]`."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoTokenizer

from oval_adapters.clip.hf_clip import HfClipEmbedder
from oval_adapters.models import resolve_model
from oval_core.errors import ConfigError, OvalError, UnsupportedModelError
from oval_mm.clip.embedder import ClipEmbedder
from oval_mm.clip.open_clip_model import OpenClipEmbedder

__all__ = ["OPEN_CLIP", "check_clip", "load_clip"]

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
    by_open_clip = _open_clip_name(name)
    if by_open_clip is not None:
        return _open_clip(by_open_clip)
    path = _checked(name)
    try:
        processor = AutoImageProcessor.from_pretrained(path)
        return HfClipEmbedder(
            AutoModel.from_pretrained(path), AutoTokenizer.from_pretrained(path), processor
        )
    except UnsupportedModelError:
        raise
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise _no_clip(name, error) from error


def check_clip(name: str) -> None:
    """Checks that there is a CLIP of this name, by its config: no weight is read. Raises as `load_clip` does."""
    by_open_clip = _open_clip_name(name)
    if by_open_clip is None:
        _checked(name)
        return
    library = _open_clip_library(by_open_clip)
    architecture = by_open_clip.partition(",")[0]
    if by_open_clip.startswith(LOCAL):
        folder = Path(by_open_clip.removeprefix(LOCAL)).expanduser()
        if not (folder / "open_clip_config.json").is_file():
            raise _no_clip(name, "no open_clip_config.json there")
    elif ":" not in architecture and architecture not in library.list_models():
        raise _no_clip(name, f"open_clip knows no architecture {architecture!r}")


def _open_clip_name(name: str) -> str | None:
    """Returns what open_clip calls it; None for a CLIP of transformers."""
    if name.startswith(OPEN_CLIP):
        return name.removeprefix(OPEN_CLIP)
    folder = Path(name).expanduser()
    is_saved = (folder / "open_clip_config.json").is_file()
    return f"{LOCAL}{folder}" if is_saved and not (folder / "config.json").is_file() else None


def _checked(name: str) -> str:
    """Returns the folder or hub id of a CLIP of transformers, once its config says that it is one."""
    try:
        path = resolve_model(name)
        config = AutoConfig.from_pretrained(path)
    except (OvalError, OSError, ValueError, KeyError, ImportError) as error:
        raise _no_clip(name, error) from error
    if config.model_type != "clip":
        HfClipEmbedder(_Named(config), None)  # told by kind, before gigabytes are read
    return path


def _no_clip(name: str, why: object) -> ConfigError:
    return ConfigError(
        f"vision.clip: {name!r} cannot be loaded ({why}). Allowed: a CLIP of transformers, a folder of open_clip, or "
        f"{OPEN_CLIP}ARCHITECTURE[,WEIGHTS]. Name one that is there."
    )


class _Named:
    """A config where a model would be: enough to be refused by name."""

    def __init__(self, config: Any) -> None:
        self.config = config


def _open_clip_library(name: str) -> Any:
    if importlib.util.find_spec("open_clip") is None:
        raise ConfigError(
            f"vision.clip: got {OPEN_CLIP}{name} without open_clip. Allowed: with the package open-clip-torch. Install "
            "`oval-pack[clip]`."
        )
    return importlib.import_module("open_clip")


def _open_clip(name: str) -> OpenClipEmbedder:
    library = _open_clip_library(name)
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
