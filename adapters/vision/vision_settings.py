"""Settles `OvalConfig.vision` for a model: its defaults where the model sees images, and a refusal where it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from oval_adapters.families import IMAGE_FAMILIES
from oval_core.config import OvalConfig
from oval_core.errors import ConfigError
from oval_core.vision_config import VisionConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["with_vision"]


def with_vision(config: OvalConfig, model: PretrainedConfig) -> OvalConfig:
    """Returns the settings as they hold for a model.

    Raises:
        ConfigError: settings for images, and a model that sees none.
    """
    sees = model.model_type in IMAGE_FAMILIES
    if config.vision is not None and not sees:
        raise ConfigError(
            f"vision: got settings with a model of type {model.model_type!r}, which sees no images. Allowed: with "
            f"{', '.join(IMAGE_FAMILIES)}. Leave vision out."
        )
    return replace(config, vision=VisionConfig()) if sees and config.vision is None else config
