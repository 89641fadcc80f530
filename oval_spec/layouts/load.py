"""Reads draft heads from a folder of any layout."""

from __future__ import annotations

from pathlib import Path

from oval_core.errors import ConfigError
from oval_spec.heads.base import DraftHeads
from oval_spec.heads.facts import BaseFacts
from oval_spec.layouts.medusa import load_medusa
from oval_spec.layouts.own import is_own, load_own
from oval_spec.layouts.report import LayoutReport


def load_heads(folder: str | Path, base: BaseFacts) -> tuple[DraftHeads, LayoutReport]:
    """Returns heads in evaluation mode, on the CPU, in the file's dtype, without `bind`; and what was found.

    Args:
        folder: with OVAL's own files, or with one of layouts A to E.
        base: the model that they should draft for.

    Raises:
        ConfigError: nothing can be read there, or it does not fit the base.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(
            f"heads {folder}: got no such folder. Allowed: a folder with draft heads. Name such a folder."
        )
    return load_own(folder, base) if is_own(folder) else load_medusa(folder, base)
