"""Refuses at the door of the demo what would fail after minutes: paths, pictures, names of models. Reads no weights."""

from __future__ import annotations

import os
from pathlib import Path

from oval_adapters.models.catalog import MODELS, ComposedModel, EmbeddedModel
from oval_adapters.models.errors import UnknownModelError
from oval_adapters.models.resolve import resolve_model
from oval_core.errors import ConfigError
from oval_mm.pictures import PictureError, read_picture

__all__ = ["check_models", "check_names", "check_page", "check_picture"]


def check_page(html: Path, picture: Path | None = None) -> None:
    """Checks where the page goes.

    Args:
        html: the page's file.
        picture: of the user, which must not be written over.

    Raises:
        ConfigError: a folder, a file in no folder or in one that cannot be written, or the picture itself.
    """
    folder = html.absolute().parent
    allowed = "Allowed: a file in an existing folder that can be written."
    if html.is_dir():
        raise ConfigError(f"html: got the folder {html}. {allowed} Name a file in it, as {html / 'demo.html'}.")  # fmt: skip
    if not folder.is_dir():
        raise ConfigError(f"html: no folder {html.parent}. {allowed} Make it first.")
    if not os.access(html if html.exists() else folder, os.W_OK):
        raise ConfigError(f"html: cannot write {html}. {allowed} Name another one.")
    if picture is not None and html.exists() and picture.exists() and html.samefile(picture):
        raise ConfigError(f"html: got {html}, which is the picture. {allowed} Name another file.")


def check_picture(picture: Path) -> None:
    """Checks that a file is a picture.

    Raises:
        ConfigError: it is none.
    """
    allowed = "Allowed: a picture that Pillow reads."
    if not picture.is_file():
        raise ConfigError(f"picture: no file {picture}. {allowed} Check the path.")
    try:
        read_picture(picture)
    except PictureError as error:
        raise ConfigError(f"picture: got {picture}: {error}. {allowed} Name another file.") from error  # fmt: skip


def check_names(text_model: str, vision_model: str) -> None:
    """Checks what names tell alone, without torch; embedded models need not be built yet.

    Raises:
        UnknownModelError: no such model, or an embedded one of another kind.
    """
    texts = [name for name, own in MODELS.items() if isinstance(own, EmbeddedModel) and own.max_length]  # fmt: skip
    seeing = [name for name, own in MODELS.items() if isinstance(own, ComposedModel)]
    given = {"text-model": (text_model, texts), "vision-model": (vision_model, seeing)}
    for option, (name, embedded) in given.items():
        _check_name(option, name, embedded)


def check_models(text_model: str, vision_model: str) -> None:
    """Checks what the configs of models tell that are not embedded.

    Raises:
        OvalError: no config can be read, or the vision model sees nothing.
    """
    from oval_adapters.evaluation.mm_model import check_vision_model
    from oval_adapters.load_model import load_config_of

    if text_model not in MODELS:
        load_config_of(text_model)
    if vision_model not in MODELS:
        check_vision_model(vision_model)


def _check_name(option: str, name: str, embedded: list[str]) -> None:
    if name in MODELS and name not in embedded:
        raise UnknownModelError(
            f"{option}: got {name!r}, which is of another kind. Allowed: an embedded model ({', '.join(embedded)}), a folder "
            "with a config.json, a hub id OWNER/NAME. Name one of them."
        )
    if name not in MODELS:
        try:
            resolve_model(name)
        except UnknownModelError as error:
            raise UnknownModelError(f"{option}: {error} Name one of them.") from error
