"""Mistral: one sliding window for all layers, or none (`sliding_window: null`)."""

from __future__ import annotations

from oval_adapters.families.base import Family, one_window

MISTRAL = Family(model_type="mistral", windows=one_window, known_layer_types=())
