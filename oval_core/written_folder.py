"""Reads the JSON file that says what the weights beside it are, in a folder that OVAL wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oval_core.errors import ConfigError


def read_facts(
    folder: Path, what: str, *, config: str, weights: str, form: str, written_by: str | None = None
) -> dict[str, Any]:
    """Returns the object in a folder's JSON file, whose `format` is as it must be.

    Args:
        folder: where both files should be.
        what: that the folder holds, for messages: `router`.
        config: name of the JSON file.
        weights: name of the file beside it; it is not looked at.
        form: what `format` must say.
        written_by: the command that writes such folders, for messages; None where a program does.
    Raises:
        ConfigError: there is no such file, it holds no object, or one of another format.
    """
    try:
        values = json.loads((folder / config).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        as_written = "" if written_by is None else f", as `{written_by}` writes it"
        raise ConfigError(
            f"{what} {folder}: {config} cannot be read ({error}). Allowed: a folder with {config} and {weights}{as_written}. "
            "Name such a folder."
        ) from error
    if not isinstance(values, dict) or values.get("format") != form:
        got = values.get("format") if isinstance(values, dict) else type(values).__name__
        raise ConfigError(
            f"{what} {folder}: got format {got!r}. Allowed: {form!r}. Use a folder that this version wrote."
        )
    return values
