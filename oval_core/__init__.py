"""The paged core of OVAL: pages, slots, pool, selection policies, attention. Imports torch, never transformers.

Names are loaded when first used: errors and settings can be had without waiting for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oval_core.config import OvalConfig, RoutingConfig, TierConfig
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
    from oval_core.policy import FullPolicy, SelectionPolicy
    from oval_core.routing.article_router import OVALRouter
    from oval_core.routing.output_aware import OutputAwareRouter
    from oval_core.routing.page_manager import PageManager
    from oval_core.routing.page_sizer import DynamicPageSizer
    from oval_core.routing.registry import create_policy
    from oval_core.routing.router import Router

__all__ = [
    "BackendUnavailableError",
    "CacheMismatchError",
    "ConfigError",
    "DynamicPageSizer",
    "FastMemoryError",
    "FullPolicy",
    "OVALRouter",
    "OutputAwareRouter",
    "OvalConfig",
    "OvalError",
    "PageManager",
    "PageTable",
    "PagedCache",
    "PromptTooLongError",
    "Router",
    "RoutingConfig",
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
    "DynamicPageSizer": "routing.page_sizer",
    "FastMemoryError": "errors",
    "FullPolicy": "policy",
    "OVALRouter": "routing.article_router",
    "OutputAwareRouter": "routing.output_aware",
    "OvalConfig": "config",
    "OvalError": "errors",
    "PageManager": "routing.page_manager",
    "PageTable": "page_table",
    "PagedCache": "paged_cache",
    "PromptTooLongError": "errors",
    "Router": "routing.router",
    "RoutingConfig": "config",
    "SelectionPolicy": "policy",
    "TierConfig": "config",
    "TierError": "errors",
    "UnsupportedModelError": "errors",
    "create_policy": "routing.registry",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"oval_core.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
