"""Phi-3: one sliding window for all layers, or none.

Its `generate` throws the cache away where a text grows past `original_max_position_embeddings` (the switch
between short and long RoPE factors); attached, that raises instead of going on without OVAL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oval_adapters.families.base import Family, one_window

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _rope_switch(config: PretrainedConfig) -> int | None:
    return getattr(config, "original_max_position_embeddings", None)


PHI3 = Family(
    model_type="phi3",
    windows=one_window,
    drops_cache_above=_rope_switch,
    known_layer_types=(),
)
