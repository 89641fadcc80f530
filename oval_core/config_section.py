"""Builds a section of the settings from plain values: the same checks for every section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, TypeVar

from oval_core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Section = TypeVar("Section", bound=DataclassInstance)

__all__ = ["check_keys", "read_section"]


def read_section(section: type[Section], name: str, example: str, values: object) -> Section:
    """Returns the section that plain values make; one that is made already stays as it is.

    Args:
        section: its dataclass.
        name: its key in the settings.
        example: settings of it, to be shown in an error.
        values: a mapping.
    Raises:
        ConfigError: it is no mapping, or has a key that the section lacks.
    """
    if isinstance(values, section):
        return values
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{name}: got {values!r}. Allowed: null, or settings such as {{{example}}}. Give these."
        )
    check_keys(values, section, f"{name}.")
    return section(**values)


def check_keys(values: Mapping[str, object], section: type[DataclassInstance], prefix: str) -> None:
    """Raises `ConfigError` for a key that is no field of the section."""
    allowed = {field.name for field in fields(section)}
    for key in values:
        if key not in allowed:
            shown = f"{prefix}{key}" if prefix or isinstance(key, str) else key
            raise ConfigError(f"unknown config key {shown!r}: {did_you_mean(str(key), allowed)}")
