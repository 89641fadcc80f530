"""A model of the open_clip library as a `ClipEmbedder`. Takes the model as it is; imports nothing of that library.

Shapes as in `embedder.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from oval_core.errors import UnsupportedModelError
from oval_mm.clip.embedder import PixelFacts
from oval_mm.clip.regions import page_weights, without_class_token
from oval_mm.clip.value_path import ValuePath

if TYPE_CHECKING:
    from oval_mm.spans import Grid

__all__ = ["OpenClipEmbedder"]

_BLOCK = "ResidualAttentionBlock"


class OpenClipEmbedder:
    """CLIP of open_clip with a `VisionTransformer`.

    Args:
        model: from `open_clip.create_model`; put into evaluation mode.
        tokenizer: from `open_clip.get_tokenizer`: texts to ids [n, 77].
        has_residual: see `ValuePath`.
    Raises:
        UnsupportedModelError: the vision tower has no value path into the joint space.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Callable[[list[str]], torch.Tensor],
        *,
        has_residual: bool = True,
    ) -> None:
        visual = model.visual
        _check(visual)
        self._model, self._tokenizer = model.eval(), tokenizer
        self._visual = visual
        self._path = _value_path(visual, has_residual)
        self.dim = int(visual.proj.shape[1])
        self.patch_grid: tuple[int, int] = tuple(visual.grid_size)
        mean, std = getattr(visual, "image_mean", None), getattr(visual, "image_std", None)
        facts = {"size": tuple(visual.image_size)}
        if mean is not None and std is not None:
            facts |= {"mean": tuple(mean), "std": tuple(std)}
        self.pixels = PixelFacts(**facts)

    @torch.no_grad()
    def embed_text(self, texts: Sequence[str]) -> torch.Tensor:
        """See `ClipEmbedder`."""
        ids = self._tokenizer(list(texts)).to(self._visual.proj.device)
        return F.normalize(self._model.encode_text(ids).float(), dim=-1)

    @torch.no_grad()
    def embed_images(self, pixels: torch.Tensor) -> torch.Tensor:
        """See `ClipEmbedder`."""
        return F.normalize(self._model.encode_image(pixels.to(self._visual.proj)).float(), dim=-1)

    @torch.no_grad()
    def hidden_of(self, pixels: torch.Tensor) -> torch.Tensor:
        """See `ClipEmbedder`."""
        found: list[torch.Tensor] = []

        def take(_: object, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
            found.append(args[0] if args else kwargs["q_x"])

        last = self._visual.transformer.resblocks[-1]
        hook = last.register_forward_pre_hook(take, with_kwargs=True)
        try:
            self._visual(pixels.to(self._visual.proj))
        finally:
            hook.remove()
        hidden = found[0]
        if not getattr(self._visual.transformer, "batch_first", True):
            hidden = hidden.transpose(0, 1)
        return without_class_token(hidden, self.patch_grid)

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
        hidden = without_class_token(hidden, patches).to(self._visual.proj)
        return self._path(hidden, page_weights(grid, pages, patches)).float()


def _check(visual: Any) -> None:
    name = type(visual).__name__
    if name != "VisionTransformer":
        raise UnsupportedModelError(
            f"CLIP: got a vision tower {name}. Allowed: open_clip's VisionTransformer. ModifiedResNet and timm towers (SigLIP, "
            "ConvNeXt, EVA) end in pooling by attention or have no tokens: their values do not lie in the joint space. "
            "Use a ViT of CLIP."
        )
    if getattr(visual, "attn_pool", None) is not None or visual.proj is None:
        raise UnsupportedModelError(
            "CLIP: got a vision tower that pools by attention (CoCa), or has no projection. Allowed: one whose tokens go "
            "through ln_post and proj. Use a ViT of CLIP."
        )
    last = visual.transformer.resblocks[-1]
    if type(last).__name__ != _BLOCK:
        raise UnsupportedModelError(
            f"CLIP: got a last layer {type(last).__name__}. Allowed: {_BLOCK}. Use a ViT without a block_type of its own."
        )


def _value_path(visual: Any, has_residual: bool) -> ValuePath:
    last, width = visual.transformer.resblocks[-1], visual.proj.shape[0]
    attention = last.attn

    def value(states: torch.Tensor) -> torch.Tensor:
        # queries, keys and values are one matrix here: the values are its last third
        bias = attention.in_proj_bias
        bias = None if bias is None else bias[2 * width :]
        return F.linear(states, attention.in_proj_weight[2 * width :], bias)

    return ValuePath(
        attention_norm=last.ln_1,
        value=value,
        out=lambda states: last.ls_1(attention.out_proj(states)),
        mlp=lambda states: last.ls_2(last.mlp(last.ln_2(states))),
        head_norm=visual.ln_post,
        project=lambda states: states @ visual.proj,
        has_residual=has_residual,
    )
