"""LLaVA: an image is one grid of patches, after a class token where the tower has one and the model keeps it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from oval_mm.spans import Grid

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["LlavaImages", "guess_views"]


class LlavaImages:
    """Facts of the images of one call of `get_image_features`, by the names of its arguments."""

    settings: tuple[str, ...] = ("vision_feature_layer", "vision_feature_select_strategy")
    """Arguments that decide features and whose default is in the config."""

    own: tuple[str, ...] = ("pixel_values", "image_sizes")
    """Arguments that hold one entry for each image."""

    def pixels(self, config: PretrainedConfig, named: Mapping[str, Any]) -> list[torch.Tensor]:
        """Returns what the tower reads of each image."""
        return list(named["pixel_values"])

    def facts(self, config: PretrainedConfig, named: Mapping[str, Any], image: int) -> object:
        """Returns what besides pixels and settings decides the features of an image, in plain values."""
        return _size(named, image)

    def can_split(self, config: PretrainedConfig, named: Mapping[str, Any]) -> bool:
        """Whether features of some of the images can be computed without the others."""
        return named.get("image_sizes") is None  # else the tower reads all of them as one text

    def part(
        self, config: PretrainedConfig, named: Mapping[str, Any], images: Sequence[int]
    ) -> dict[str, Any]:
        """Returns the arguments of a call for some of the images."""
        chosen = torch.tensor(images, device=named["pixel_values"].device)
        return {**named, "pixel_values": named["pixel_values"][chosen]}

    def views(
        self, config: PretrainedConfig, named: Mapping[str, Any], image: int, num_tokens: int
    ) -> tuple[Grid, ...]:
        """Returns the grids that an image's tokens are, in order."""
        size = _size(named, image) or tuple(named["pixel_values"].shape[-2:])
        high, wide = _patch(config)
        rows, cols = size[0] // high, size[1] // wide
        ahead = num_tokens - rows * cols  # a class token, and registers
        if rows * cols == 0 or not 0 <= ahead <= 32:
            return guess_views(num_tokens)
        return (*([Grid(1, ahead)] if ahead else []), Grid(rows, cols))

    def hidden(
        self, config: PretrainedConfig, named: Mapping[str, Any], output: Any
    ) -> Sequence[torch.Tensor] | None:
        """Returns the tower's states [n, D] behind each image's features; None where they are not one to one."""
        states = getattr(output, "hidden_states", None)
        if not states or named.get("image_sizes") is not None:
            return None
        layers = setting(config, named, "vision_feature_layer")
        chosen = [states[i] for i in ([layers] if isinstance(layers, int) else layers)]
        if any(state is None for state in chosen):
            return None
        joined = torch.cat(chosen, dim=-1)
        if setting(config, named, "vision_feature_select_strategy") == "default":
            joined = joined[:, 1:]
        return list(joined)


def setting(config: PretrainedConfig, named: Mapping[str, Any], name: str) -> Any:
    """Returns an argument, or the config's where it was left out."""
    value = named.get(name)
    return getattr(config, name, None) if value is None else value


def guess_views(num_tokens: int) -> tuple[Grid, ...]:
    """Returns grids for an image of which nothing else is known: a square, one behind a class token, or a line."""
    for ahead in (0, 1):
        side = math.isqrt(num_tokens - ahead)
        if side and side * side == num_tokens - ahead:
            return (*([Grid(1, ahead)] if ahead else []), Grid(side, side))
    return (Grid(1, num_tokens),)


def _size(named: Mapping[str, Any], image: int) -> tuple[int, ...] | None:
    sizes = named.get("image_sizes")
    return None if sizes is None else tuple(int(side) for side in sizes[image])


def _patch(config: PretrainedConfig) -> tuple[int, int]:
    patch = config.vision_config.patch_size
    return (patch, patch) if isinstance(patch, int) else (int(patch[0]), int(patch[1]))
