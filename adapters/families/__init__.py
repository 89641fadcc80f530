"""Facts of model families, looked up by `config.model_type`. A new family is one file and one line here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from oval_adapters.families.base import Family
from oval_core.errors import UnsupportedModelError, did_you_mean

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from oval_adapters.families.llava import LlavaImages

__all__ = ["FAMILIES", "IMAGE_FAMILIES", "WRAPPERS", "Family", "decoder_family", "image_family"]

FAMILIES = {
    "gemma2": "oval_adapters.families.gemma:GEMMA2",
    "gemma3_text": "oval_adapters.families.gemma:GEMMA3_TEXT",
    "llama": "oval_adapters.families.llama:LLAMA",
    "mistral": "oval_adapters.families.mistral:MISTRAL",
    "phi3": "oval_adapters.families.phi3:PHI3",
    "qwen2": "oval_adapters.families.qwen:QWEN2",
    "qwen3": "oval_adapters.families.qwen:QWEN3",
}
"""Decoders: model_type -> where its facts are."""

IMAGE_FAMILIES = {
    "llava": "oval_adapters.families.llava:LlavaImages",
    "llava_next": "oval_adapters.families.llava_next:LlavaNextImages",
    "llava_onevision": "oval_adapters.families.llava_next:LlavaOnevisionImages",
}
"""Models that see images: model_type -> where the facts of their images are."""

WRAPPERS = tuple(IMAGE_FAMILIES)
"""Models around a decoder: their text model is looked up in FAMILIES."""


def decoder_family(config: PretrainedConfig) -> Family:
    """Returns the facts of a decoder.

    Args:
        config: config of the whole model; of LLaVA its text model counts.
    Raises:
        UnsupportedModelError: no facts are known for this type, or the config asks for something
            that OVAL cannot run exactly.
    """
    if config.model_type in WRAPPERS:
        config = config.get_text_config(decoder=True)
    if config.model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"model type {config.model_type!r}: OVAL has no facts about its layers (which are windowed, "
            "what their attention adds), so it cannot promise exact results. "
            f"{did_you_mean(config.model_type, [*FAMILIES, *WRAPPERS])} "
            "To add it, write a file in oval_adapters/families and run the parity tests."
        )
    family: Family = _load(FAMILIES[config.model_type])
    family.check(config)
    return family


def image_family(config: PretrainedConfig) -> LlavaImages | None:
    """Returns the facts of a model's images; None for a model that sees none."""
    home = IMAGE_FAMILIES.get(config.model_type)
    if home is None:
        return None
    made: LlavaImages = _load(home)()
    return made


def _load(home: str) -> Any:
    module, _, name = home.partition(":")
    return getattr(importlib.import_module(module), name)
