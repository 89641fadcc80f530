"""A `CLIPModel` of transformers as a `ClipEmbedder`. Shapes as in `oval_mm/clip/embedder.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from oval_core.errors import UnsupportedModelError
from oval_mm.clip.embedder import PixelFacts
from oval_mm.clip.regions import page_weights, without_class_token
from oval_mm.clip.value_path import ValuePath

if TYPE_CHECKING:
    from oval_mm.spans import Grid

__all__ = ["HfClipEmbedder", "vision_layers"]

_BY_ATTENTION = ("siglip", "siglip2", "siglip_vision_model", "siglip2_vision_model")


class HfClipEmbedder:
    """CLIP of transformers.

    Args:
        model: a `CLIPModel`; put into evaluation mode.
        tokenizer: its tokenizer.
        image_processor: says mean and standard deviation of pixels; None for OpenAI's.
        has_residual: see `ValuePath`.
    Raises:
        UnsupportedModelError: another kind of model.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        image_processor: Any = None,
        *,
        has_residual: bool = True,
    ) -> None:
        _check(model)
        self._model, self._tokenizer = model.eval(), tokenizer
        self.tower = model.vision_model
        self._path = _value_path(self.tower, model.visual_projection, has_residual)
        self.dim = int(model.config.projection_dim)
        vision = model.config.vision_config
        rows = vision.image_size // vision.patch_size
        self.patch_grid = (rows, rows)
        facts: dict[str, Any] = {"size": (vision.image_size, vision.image_size)}
        if image_processor is not None:
            facts["mean"] = tuple(image_processor.image_mean)
            facts["std"] = tuple(image_processor.image_std)
        self.pixels = PixelFacts(**facts)
        self._max_text = int(model.config.text_config.max_position_embeddings)

    @torch.no_grad()
    def embed_text(self, texts: Sequence[str]) -> torch.Tensor:
        """See `ClipEmbedder`."""
        inputs = self._tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=self._max_text,
            return_tensors="pt",
        )
        weight = self._model.visual_projection.weight
        output = self._model.get_text_features(
            input_ids=inputs["input_ids"].to(weight.device),
            attention_mask=inputs["attention_mask"].to(weight.device),
        )
        return F.normalize(_pooled(output).float(), dim=-1)

    @torch.no_grad()
    def embed_images(self, pixels: torch.Tensor) -> torch.Tensor:
        """See `ClipEmbedder`."""
        output = self._model.get_image_features(pixels.to(self._model.visual_projection.weight))
        return F.normalize(_pooled(output).float(), dim=-1)

    @torch.no_grad()
    def hidden_of(self, pixels: torch.Tensor) -> torch.Tensor:
        """See `ClipEmbedder`."""
        pixels = pixels.to(self._model.visual_projection.weight)
        output = self.tower(pixels, output_hidden_states=True, return_dict=True)
        return without_class_token(output.hidden_states[-2], self.patch_grid)

    @torch.no_grad()
    def embed_regions(
        self,
        hidden: torch.Tensor,
        grid: Grid,
        pages: Sequence[Sequence[int]],
        patches: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """See `ClipEmbedder`."""
        patches = patches or (grid.rows, grid.cols)
        hidden = without_class_token(hidden, patches).to(self._model.visual_projection.weight)
        return self._path(hidden, page_weights(grid, pages, patches)).float()


def vision_layers(tower: Any) -> Any:
    """Returns the layers of a CLIP vision tower of any transformers 5; they moved up a level in the series."""
    return getattr(tower, "vision_model", tower).encoder.layers


def _pooled(output: Any) -> torch.Tensor:
    # a tensor in transformers 4, an output object since 5
    pooled: torch.Tensor = output if torch.is_tensor(output) else output.pooler_output
    return pooled


def _check(model: Any) -> None:
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind in _BY_ATTENTION:
        raise UnsupportedModelError(
            f"CLIP: got {kind!r}. Allowed: clip. SigLIP pools its tokens by an attention head, so the value of one patch does "
            "not lie in the joint space. Use a CLIP, or another page router."
        )
    if kind != "clip" or not hasattr(model, "visual_projection") or not hasattr(model, "text_model"):  # fmt: skip
        raise UnsupportedModelError(
            f"CLIP: got {type(model).__name__} ({kind}). Allowed: a CLIPModel of transformers, with both towers. "
            "Load it by AutoModel.from_pretrained."
        )


def _value_path(tower: Any, projection: torch.nn.Module, has_residual: bool) -> ValuePath:
    tower = getattr(tower, "vision_model", tower)
    last = tower.encoder.layers[-1]
    return ValuePath(
        attention_norm=last.layer_norm1,
        value=last.self_attn.v_proj,
        out=last.self_attn.out_proj,
        mlp=lambda states: last.mlp(last.layer_norm2(states)),
        head_norm=tower.post_layernorm,
        project=projection,
        has_residual=has_residual,
    )
