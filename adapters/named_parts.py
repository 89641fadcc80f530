"""Checks the names in settings that lead to parts which ship or lie on disk, before a model is read. Loads no part."""

from __future__ import annotations

from oval_adapters.speculative.drafters import check_drafter_names
from oval_core.config import OvalConfig
from oval_core.vision_config import VisionConfig
from oval_mm.fusion_checkpoint import check_fusion
from oval_mm.page_choice import check_scorer_name

__all__ = ["check_names"]


def check_names(config: OvalConfig) -> None:
    """Checks routers of images, trees and draft heads, also those that wait for a setting that turns them on.

    Raises:
        ConfigError: a name leads nowhere.
    """
    if config.vision is not None:
        _check_image_router(config.vision)
    if config.speculation is not None:
        check_drafter_names(config.speculation)


def _check_image_router(vision: VisionConfig) -> None:
    if vision.router != "auto" and check_scorer_name(vision.router):
        check_fusion(vision.router)
