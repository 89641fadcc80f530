"""Qwen2 and Qwen3: a sliding window from layer `max_window_layers` on, if `use_sliding_window`."""

from __future__ import annotations

from oval_adapters.families.base import Family, windows_by_layer_type

QWEN2 = Family(model_type="qwen2", windows=windows_by_layer_type)
QWEN3 = Family(model_type="qwen3", windows=windows_by_layer_type)
