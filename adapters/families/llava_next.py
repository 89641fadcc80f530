"""LLaVA-NeXT and OneVision: an overview, then a grid of as many parts as the picture's shape asks for, newline tokens in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from transformers.models.llava_next.modeling_llava_next import (
    get_anyres_image_grid_shape,
    image_size_to_num_patches,
    unpad_image,
)

from oval_adapters.families.llava import LlavaImages, guess_views, setting
from oval_mm.spans import Grid

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["LlavaNextImages", "LlavaOnevisionImages"]


class LlavaNextImages(LlavaImages):
    """Facts of images that come as several parts each."""

    def pixels(self, config: PretrainedConfig, named: Mapping[str, Any]) -> list[torch.Tensor]:
        """Returns the parts of each image, without those that only fill up the batch."""
        values, counts = named["pixel_values"], self._counts(config, named)
        if values.ndim == 5:
            return [own[:count] for own, count in zip(values, counts, strict=True)]
        return list(torch.split(values, counts))

    def facts(self, config: PretrainedConfig, named: Mapping[str, Any], image: int) -> object:
        """Returns the size of the picture: it decides what of the grid is padding."""
        return self._sizes(named)[image]

    def can_split(self, config: PretrainedConfig, named: Mapping[str, Any]) -> bool:
        """Always: no image sees another one."""
        return True

    def part(
        self, config: PretrainedConfig, named: Mapping[str, Any], images: Sequence[int]
    ) -> dict[str, Any]:
        """Returns the arguments of a call for some of the images."""
        values = named["pixel_values"]
        if values.ndim == 5:
            values = values[torch.tensor(images, device=values.device)]
        else:
            parts = self.pixels(config, named)
            values = torch.cat([parts[image] for image in images])
        sizes = [named["image_sizes"][image] for image in images]
        if torch.is_tensor(named["image_sizes"]):
            sizes = torch.stack(sizes)
        return {**named, "pixel_values": values, "image_sizes": sizes}

    def views(
        self, config: PretrainedConfig, named: Mapping[str, Any], image: int, num_tokens: int
    ) -> tuple[Grid, ...]:
        """Returns the overview and the parts together, without the padding around the picture."""
        side = config.vision_config.image_size // config.vision_config.patch_size
        if self._counts(config, named)[image] == 1:
            found = (Grid(side, side), Grid(1, 1))  # one newline token behind it
        else:
            rows, cols = self._unpadded(config, named, image, side)
            if rows * cols == 0:
                return guess_views(num_tokens)
            found = (Grid(side, side), Grid(rows, cols, newline=True))
        fits = sum(grid.size for grid in found) == num_tokens
        return found if fits else guess_views(num_tokens)

    def hidden(
        self, config: PretrainedConfig, named: Mapping[str, Any], output: Any
    ) -> Sequence[torch.Tensor] | None:
        """Returns None: newline tokens have no state, and padding is cut out."""
        return None

    def _unpadded(
        self, config: PretrainedConfig, named: Mapping[str, Any], image: int, side: int
    ) -> tuple[int, int]:
        size = list(self._sizes(named)[image])
        pinpoints, width = config.image_grid_pinpoints, config.vision_config.image_size
        high, wide = get_anyres_image_grid_shape(size, pinpoints, width)
        whole = torch.empty(1, high * side, wide * side, device="meta")
        rows, cols = unpad_image(whole, size).shape[1:]
        return int(rows), int(cols)

    def _counts(self, config: PretrainedConfig, named: Mapping[str, Any]) -> list[int]:
        pinpoints, width = config.image_grid_pinpoints, config.vision_config.image_size
        sizes = [list(size) for size in self._sizes(named)]
        return [image_size_to_num_patches(size, pinpoints, width) for size in sizes]

    @staticmethod
    def _sizes(named: Mapping[str, Any]) -> list[tuple[int, int]]:
        return [(int(size[0]), int(size[1])) for size in named["image_sizes"]]


class LlavaOnevisionImages(LlavaNextImages):
    """As LLaVA-NeXT, with large grids made smaller, and without parts where a row has several images."""

    settings = (*LlavaNextImages.settings, "vision_aspect_ratio")
    own = (*LlavaNextImages.own, "batch_num_images")

    def facts(self, config: PretrainedConfig, named: Mapping[str, Any], image: int) -> object:
        """Returns the size, and whether the image is read in parts."""
        return super().facts(config, named, image), self._is_alone(named)[image]

    def can_split(self, config: PretrainedConfig, named: Mapping[str, Any]) -> bool:
        """Not where an image has others beside it: alone it would be read in parts."""
        return all(self._is_alone(named))

    def part(
        self, config: PretrainedConfig, named: Mapping[str, Any], images: Sequence[int]
    ) -> dict[str, Any]:
        """Returns the arguments of a call for some of the images, each alone in its row."""
        return {**super().part(config, named, images), "batch_num_images": None}

    def _unpadded(
        self, config: PretrainedConfig, named: Mapping[str, Any], image: int, side: int
    ) -> tuple[int, int]:
        rows, cols = super()._unpadded(config, named, image, side)
        most = int(setting(config, named, "vision_aspect_ratio").removeprefix("anyres_max_"))
        ratio = math.sqrt(rows * cols / (most * side**2))
        return (int(rows // ratio), int(cols // ratio)) if ratio > 1.1 else (rows, cols)

    def _counts(self, config: PretrainedConfig, named: Mapping[str, Any]) -> list[int]:
        counts = super()._counts(config, named)
        alone = self._is_alone(named)
        return [count if own else 1 for count, own in zip(counts, alone, strict=True)]

    @staticmethod
    def _is_alone(named: Mapping[str, Any]) -> list[bool]:
        numbers = named.get("batch_num_images")
        if numbers is None:
            return [True] * len(named["image_sizes"])
        ends = list(accumulate((int(number) for number in numbers), initial=0))
        return [end - start == 1 for start, end in pairwise(ends) for _ in range(end - start)]
