"""Llama and models saved as Llama (SmolLM2, Vicuna): full causal attention in every layer."""

from __future__ import annotations

from oval_adapters.families.base import Family

LLAMA = Family(model_type="llama")
