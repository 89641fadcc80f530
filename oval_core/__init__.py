"""The paged core of OVAL: pages, slots, pool, selection policies, attention. Imports torch, never transformers."""

from __future__ import annotations

from oval_core.config import OvalConfig
from oval_core.errors import (
    BackendUnavailableError,
    CacheMismatchError,
    ConfigError,
    OvalError,
    PromptTooLongError,
    UnsupportedModelError,
)
from oval_core.page_table import PageTable
from oval_core.paged_cache import PagedCache
from oval_core.policy import FullPolicy, SelectionPolicy, create_policy

__all__ = [
    "BackendUnavailableError",
    "CacheMismatchError",
    "ConfigError",
    "FullPolicy",
    "OvalConfig",
    "OvalError",
    "PageTable",
    "PagedCache",
    "PromptTooLongError",
    "SelectionPolicy",
    "UnsupportedModelError",
    "create_policy",
]
