"""OVAL for Hugging Face models: `attach` a model and `generate` on the paged cache."""

from __future__ import annotations

from oval_adapters.attach import Attachment, attach
from oval_adapters.hf_cache import OvalCache
from oval_adapters.load_config import config_names, load_config

__all__ = ["Attachment", "OvalCache", "attach", "config_names", "load_config"]
