"""Tells whether LLaVA's own vision tower is that of a CLIP checkpoint, so that one image pass serves both."""

from __future__ import annotations

from typing import Any

import torch

from oval_adapters.clip.hf_clip import HfClipEmbedder, vision_layers
from oval_mm.clip.embedder import ClipEmbedder

__all__ = ["why_not_shared"]


def why_not_shared(llava: Any, embedder: ClipEmbedder) -> str | None:
    """Returns why LLaVA's image hidden states cannot stand for those of the CLIP; None where they can.

    They can where LLaVA selects what enters the last CLIP layer (`vision_feature_layer` -2), and everything up to there
    is equal: shapes and weights, rounded to the coarser type of both.

    Args:
        llava: a LLaVA model of transformers.
        embedder: the CLIP that pages are embedded by.
    """
    if not isinstance(embedder, HfClipEmbedder):
        return "the CLIP is not one of transformers"
    tower = getattr(llava, "model", llava).vision_tower
    kind = tower.config.model_type
    if kind not in ("clip", "clip_vision_model"):
        return f"LLaVA's tower is a {kind}"
    num_layers = len(vision_layers(tower))
    layer = llava.config.vision_feature_layer
    if layer not in (-2, num_layers - 1):
        return f"LLaVA reads layer {layer} of its tower, not what enters the last one (-2)"
    own, other = _before_last(tower), _before_last(embedder.tower)
    if own.keys() != other.keys():
        return "the towers have other layers"
    for name, weight in own.items():
        if weight.shape != other[name].shape:
            return f"{name} is {list(weight.shape)} in LLaVA's tower, {list(other[name].shape)} in the CLIP's"
    changed = [name for name, weight in own.items() if not _equal(weight, other[name])]
    return f"weights differ: {changed[0]}" if changed else None


def _before_last(tower: Any) -> dict[str, torch.Tensor]:
    """Returns the weights that decide what enters the last layer."""
    tower = getattr(tower, "vision_model", tower)
    last = f"encoder.layers.{len(vision_layers(tower)) - 1}."
    skipped = (last, "post_layernorm.", "head.")
    named = tower.named_parameters()
    return {name: weight for name, weight in named if not name.startswith(skipped)}


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    coarse = first.dtype if torch.finfo(first.dtype).eps >= torch.finfo(second.dtype).eps else second.dtype  # fmt: skip
    return torch.equal(first.detach().to(coarse), second.detach().to(first.device, coarse))
