"""Turns a name, a file, a mapping or nothing into an `OvalConfig`. Strict: an unknown key raises."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from oval_core.config import OvalConfig
from oval_core.errors import ConfigError, did_you_mean

__all__ = ["config_names", "load_config"]


def load_config(source: str | Path | Mapping[str, Any] | OvalConfig | None = None) -> OvalConfig:
    """Loads a configuration.

    Args:
        source: a name from `config_names()`, a path to a YAML file, a mapping, a ready config, or None
            for the defaults.
    Raises:
        ConfigError: no such name or file, not a mapping, an unknown key or a value out of range.
    """
    if source is None:
        return OvalConfig()
    if isinstance(source, OvalConfig):
        return source
    if isinstance(source, Mapping):
        return OvalConfig.from_dict(source)
    if not isinstance(source, str | Path):
        raise ConfigError(
            f"config: got {type(source).__name__}. Allowed: a name, a path to a YAML file, a mapping, "
            "an OvalConfig or None. Pass one of these."
        )
    text, origin = _read(source)
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: not readable as YAML: {error}. Mend the file.") from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{origin}: got a {type(values).__name__}. Allowed: `key: value` lines. Mend the file."
        )
    try:
        return OvalConfig.from_dict(values)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from error


def config_names() -> list[str]:
    """Names of the configurations that ship with the package."""
    folder = resources.files("oval_adapters.configs")
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    )


def _read(source: str | Path) -> tuple[str, str]:
    if str(source) in config_names():
        entry = resources.files("oval_adapters.configs") / f"{source}.yaml"
        return entry.read_text(encoding="utf-8"), f"config {str(source)!r}"
    path = Path(source)
    if not path.is_file():
        raise ConfigError(
            f"config {str(source)!r}: no shipped configuration has this name and no file is there; "
            f"{did_you_mean(str(source), config_names())}"
        )
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}. Give a readable YAML file.") from error
