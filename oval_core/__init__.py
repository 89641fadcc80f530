"""The paged core of OVAL: pages, slots, pool, selection policies, attention. Imports torch, never transformers.

Names are loaded when first used: errors and settings can be had without waiting for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oval_core.config import OvalConfig, TierConfig
    from oval_core.errors import (
        BackendUnavailableError,
        CacheMismatchError,
        ConfigError,
        FastMemoryError,
        OvalError,
        PromptTooLongError,
        TierError,
        UnsupportedModelError,
    )
    from oval_core.page_table import PageTable
    from oval_core.paged_cache import PagedCache
    from oval_core.policy import FullPolicy, SelectionPolicy, create_policy

__all__ = [
    "BackendUnavailableError",
    "CacheMismatchError",
    "ConfigError",
    "FastMemoryError",
    "FullPolicy",
    "OvalConfig",
    "OvalError",
    "PageTable",
    "PagedCache",
    "PromptTooLongError",
    "SelectionPolicy",
    "TierConfig",
    "TierError",
    "UnsupportedModelError",
    "create_policy",
]

_HOMES = {
    "BackendUnavailableError": "errors",
    "CacheMismatchError": "errors",
    "ConfigError": "errors",
    "FastMemoryError": "errors",
    "FullPolicy": "policy",
    "OvalConfig": "config",
    "OvalError": "errors",
    "PageTable": "page_table",
    "PagedCache": "paged_cache",
    "PromptTooLongError": "errors",
    "SelectionPolicy": "policy",
    "TierConfig": "config",
    "TierError": "errors",
    "UnsupportedModelError": "errors",
    "create_policy": "policy",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"oval_core.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
