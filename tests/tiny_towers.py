"""Tiny random LLaVA models with other vision towers than CLIP, and those that read a picture in parts."""

from __future__ import annotations

import functools
from typing import Any

import torch
from tiny_models import IMAGE_TOKEN, MAX_POSITIONS, VOCAB
from transformers import (
    CLIPVisionConfig,
    Dinov2Config,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    PreTrainedModel,
    SiglipVisionConfig,
)

SIDE = 40
"""Pixels on a side; patches of 8 make a grid of 5 x 5, which no tile of 4 x 4 divides."""

GRID = 5

_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 8,
    "initializer_range": 0.25,
}
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 3,
    "initializer_range": 0.25,
}
_COMMON: dict[str, Any] = {
    "image_token_index": IMAGE_TOKEN,
    "vision_feature_layer": -2,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
}

TOWERS = ("clip", "clip-full", "siglip", "dinov2")
"""CLIP with and without its class token, SigLIP that has none, DINOv2."""

TOKENS = {"clip": 25, "clip-full": 26, "siglip": 25, "dinov2": 25, "tiny": 4}
"""Tokens of one image."""


@functools.cache
def tower_model(tower: str) -> PreTrainedModel:
    """Returns one LLaVA for all tests that leave it as they found it."""
    return build_tower(tower)


def build_tower(tower: str, seed: int = 0, **text: Any) -> PreTrainedModel:
    """Builds a LLaVA with this tower, in evaluation mode and float32."""
    torch.manual_seed(seed)
    if tower == "siglip":
        vision: Any = SiglipVisionConfig(**_VISION, intermediate_size=32)
    elif tower == "dinov2":
        vision = Dinov2Config(**_VISION, mlp_ratio=1)
    else:
        vision = CLIPVisionConfig(**_VISION, intermediate_size=32)
    keeps_all = tower in ("siglip", "clip-full")
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**{**_TEXT, **text}, tie_word_embeddings=False),
        vision_feature_select_strategy="full" if keeps_all else "default",
        **_COMMON,
    )
    return _ready(LlavaForConditionalGeneration._from_config(config))


@functools.cache
def parts_model(kind: str) -> PreTrainedModel:
    """Returns a LLaVA-NeXT (`next`) or OneVision (`onevision`) for all tests that leave it as they found it."""
    torch.manual_seed(0)
    pinpoints = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
    text = LlamaConfig(**_TEXT, tie_word_embeddings=False)
    if kind == "next":
        vision = CLIPVisionConfig(**_VISION, intermediate_size=32)
        config = LlavaNextConfig(
            vision_config=vision, text_config=text, image_grid_pinpoints=pinpoints, **_COMMON
        )
        return _ready(LlavaNextForConditionalGeneration._from_config(config))
    vision = SiglipVisionConfig(**_VISION, intermediate_size=32)
    config = LlavaOnevisionConfig(
        vision_config=vision,
        text_config=text,
        image_grid_pinpoints=pinpoints,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_2",
        **_COMMON,
    )
    return _ready(LlavaOnevisionForConditionalGeneration._from_config(config))


def images(count: int, seed: int = 2, side: int = SIDE) -> torch.Tensor:
    """Returns random images [count, 3, side, side]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, side, side, generator=generator)


def rows_of(layouts: list[list[int]], tokens: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """Returns ids and mask of prompts, padded on the left.

    Args:
        layouts: by row, lengths of text; between two texts there is an image (a length may be 0).
        tokens: of an image.
        seed: of the text.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for layout in layouts:
        row: list[int] = []
        for index, length in enumerate(layout):
            row += [IMAGE_TOKEN] * tokens if index else []
            row += torch.randint(5, VOCAB, (length,), generator=generator).tolist()
        rows.append(row)
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def _ready(model: PreTrainedModel) -> PreTrainedModel:
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()
