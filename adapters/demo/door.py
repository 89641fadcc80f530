"""Refuses at the door of the demo what would fail after minutes: paths, pictures, names of models. Reads no weights."""

from __future__ import annotations

from pathlib import Path

from oval_adapters.models.catalog import MODELS, ComposedModel, EmbeddedModel
from oval_adapters.models.errors import UnknownModelError
from oval_adapters.models.resolve import resolve_model
from oval_core.errors import ConfigError
from oval_mm.pictures import PictureError, read_picture

__all__ = ["check_models", "check_names", "check_page", "check_picture"]


def check_page(html: Path, picture: Path) -> None:
    """Checks that the page's file is not the user's picture, which it would be written over.

    Raises:
        ConfigError: it is.
    """
    if html.exists() and picture.exists() and html.samefile(picture):
        raise ConfigError(
            f"html: got {html}, which is the picture. Allowed: a file of its own. Name another file."
        )


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
