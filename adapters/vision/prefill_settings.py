"""Makes what chooses image pages of settings: budget, router, CLIP and tokenizer by name."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer

from oval_adapters.clip.load import check_clip, load_clip
from oval_adapters.clip.page_vectors import ImagePageVectors, TextPageVectors
from oval_adapters.vision.prefill_choice import PrefillChoice
from oval_adapters.vision.prefill_clip import PromptVectors
from oval_core.errors import ConfigError
from oval_core.vision_config import VisionConfig
from oval_mm.budget import ImageBudget
from oval_mm.fusion_checkpoint import load_fusion
from oval_mm.fusion_router import FusionRouter
from oval_mm.page_choice import ImagePageScorer, create_scorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["check_image_clip", "create_choice", "prompt_vectors"]

_log = logging.getLogger(__name__)


def create_choice(config: VisionConfig, model: PreTrainedModel) -> PrefillChoice | None:
    """Returns what chooses a prompt's image pages; None where all are read.

    Raises:
        ConfigError: a name that leads nowhere, or a router made for another model.
    """
    if not config.limits_images:
        return None
    budget = ImageBudget(
        share=config.budget, tokens=config.budget_tokens, pages_per_image=config.pages_per_image
    )
    name = config.router
    if name == "auto":
        name = "uniform" if config.clip is None else "clip"
        _log.info("vision.router: auto took %r", name)
    scorer = create_scorer(name, seed=config.seed, load_router=lambda own: _fusion(own, model))
    return PrefillChoice(budget, scorer, config.tile, _vectors(config, scorer, model))


def check_image_clip(config: VisionConfig | None) -> None:
    """Checks, before a model is read, the CLIP of a router that needs one, where images are read in part.

    Raises:
        ConfigError: none is named, or none of that name is there.
        UnsupportedModelError: its patches do not lie in the joint space.
    """
    if config is None or not config.limits_images:
        return
    if config.router == "clip" or (config.router == "auto" and config.clip is not None):
        check_clip(_clip_of(config))


def prompt_vectors(model: PreTrainedModel, clip: Any, tokenizer: Any) -> PromptVectors:
    """Returns the vectors of prompts by a CLIP (`oval_mm.clip.embedder.ClipEmbedder`) and the decoder's tokenizer."""
    images = ImagePageVectors(model, clip)
    if not images.shared:
        _log.info("vision.clip: a second image pass is needed: %s", images.why_not)
    return PromptVectors(images, TextPageVectors(clip, tokenizer))


def _vectors(
    config: VisionConfig, scorer: ImagePageScorer, model: PreTrainedModel
) -> PromptVectors | None:
    if not scorer.needs_clip:
        return None
    clip = _clip_of(config)
    name = model.config.name_or_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"vision.router: 'clip' reads the words of questions, and {name!r} has no tokenizer ({error}). Allowed: a model "
            "folder with its tokenizer. Save it there, or choose another router."
        ) from error
    return prompt_vectors(model, load_clip(clip), tokenizer)


def _clip_of(config: VisionConfig) -> str:
    if config.clip is None:
        raise ConfigError(
            "vision.clip: got null with router 'clip'. Allowed: a CLIP of transformers, or open_clip:ARCHITECTURE[,WEIGHTS]. "
            "Name one, or choose another router."
        )
    return config.clip


def _fusion(folder: str, model: PreTrainedModel) -> FusionRouter:
    router = load_fusion(folder).router
    size = model.config.get_text_config(decoder=True).hidden_size
    if router.config.hidden_size != size:
        raise ConfigError(
            f"vision.router: {folder!r} was trained for hidden size {router.config.hidden_size}. Allowed with this model: "
            f"{size}. Train one for it."
        )
    return router.to(model.device)
