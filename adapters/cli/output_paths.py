"""Where commands write: checked before the work begins, so that hours of it never end in a path that takes no file."""

from __future__ import annotations

import os
from pathlib import Path


def check_output_file(name: str, path: Path) -> None:
    """Checks that a file can be written there; what lies there already may be replaced.

    Args:
        name: of the option, for the message.
        path: as the user gave it.

    Raises:
        ConfigError: the path is a folder, its folder is absent, or neither may be written to.
    """
    from oval_core.errors import ConfigError

    folder = path.absolute().parent
    if path.is_dir():
        raise ConfigError(f"{name}: got {path}, a folder. Allowed: a file. Name one in it.")
    if not folder.is_dir():
        raise ConfigError(
            f"{name}: no folder {path.parent}. Allowed: an existing one. Make it first."
        )
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(
            f"{name}: {path} cannot be written. Allowed: a file that you may write. Name another."
        )


def check_output_folder(name: str, path: Path) -> None:
    """Checks that files can be written into a folder, which is made later if it is absent.

    Args:
        name: of the option, for the message.
        path: as the user gave it.

    Raises:
        ConfigError: it, or the nearest folder above it that is there, is a file or may not be written to.
    """
    from oval_core.errors import ConfigError

    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise ConfigError(f"{name}: got {path}, and {there} is a file. Allowed: a folder. Name another.")  # fmt: skip
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{name}: {path} cannot be written, {there} is locked. Allowed: a folder that you may write. Name another."
        )


def write_page(name: str, path: Path, page: str) -> None:
    """Writes a page of HTML; lone surrogates of the data become references.

    Raises:
        ConfigError: the disk does not take it.
    """
    from oval_core.errors import ConfigError

    try:
        path.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
    except OSError as error:
        raise ConfigError(
            f"{name}: cannot write {path}: {error.strerror}. Allowed: a file with room for {len(page)} characters. Name another."
        ) from error
