"""OVAL for Hugging Face models: `attach` a model and `generate` on the paged cache.

Names are loaded when first used, so that `oval --help` does not wait for torch and transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oval_adapters.attachment import Attachment, attach
    from oval_adapters.config_files import config_names, load_config
    from oval_adapters.hf_cache import OvalCache

__all__ = ["Attachment", "OvalCache", "attach", "config_names", "load_config"]

_HOMES = {
    "Attachment": "oval_adapters.attachment",
    "OvalCache": "oval_adapters.hf_cache",
    "attach": "oval_adapters.attachment",
    "config_names": "oval_adapters.config_files",
    "load_config": "oval_adapters.config_files",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
