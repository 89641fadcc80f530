"""Gemma 2 and Gemma 3 text: windowed and full layers in turn; Gemma 2 soft-caps its scores.

The soft cap arrives with each attention call, so it is not a fact here.
"""

from __future__ import annotations

from oval_adapters.families.base import Family, windows_by_layer_type

GEMMA2 = Family(model_type="gemma2", windows=windows_by_layer_type)
GEMMA3_TEXT = Family(model_type="gemma3_text", windows=windows_by_layer_type)
