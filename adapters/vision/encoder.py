"""Stands before a model's `get_image_features`: images that it has seen are not encoded again; notes what the others are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from oval_adapters.families.llava import LlavaImages, setting
from oval_adapters.vision.feature_cache import (
    FeatureCache,
    ImageFeatures,
    image_key,
    weights_stamp,
)
from oval_core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Encoded", "ImageEncoder"]

_HARMLESS = ("return_dict", "use_cache", "output_attentions", "output_hidden_states")
"""Further arguments that decide no feature."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One call: the tensors that the model gets, and what is known of each image behind them."""

    tensors: Sequence[torch.Tensor]
    images: Sequence[ImageFeatures]


class ImageEncoder:
    """Encodes images for the model around a decoder, which has tower and projector."""

    def __init__(self, body: PreTrainedModel, family: LlavaImages, capacity: int) -> None:
        """Begins with nothing.

        Args:
            body: the model around the decoder.
            family: facts of its images.
            capacity: images to keep.
        """
        self._body, self._family = body, family
        self._capacity = capacity
        self._signature = inspect.signature(body.get_image_features)
        self.kept = FeatureCache(capacity)
        self.num_encoded = 0
        self.num_reused = 0
        self.keeps_pixels = False
        """Whether images keep their pixels: some page routers look at them."""

    def encode(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Encoded | None]:
        """Runs `get_image_features` for the images that are new.

        Returns:
            The output, and what is known of it. With all images new the output is the model's own; with some known it has
            no more than `pooler_output`, which is all that models read of encoded images. None where the caller asked for
            a tuple.
        Raises:
            ConfigError: pixels of one image without the dimension of images.
        """
        named = self._names(args, kwargs)
        pixels = named.get("pixel_values")
        if isinstance(pixels, torch.Tensor) and pixels.ndim < 4:
            raise ConfigError(
                f"pixel_values: got shape {tuple(pixels.shape)}. Allowed: an image each, as the processor makes them, such as "
                "[images, 3, height, width]. Add the first dimension with pixels[None]."
            )
        if named.get("return_dict", self._body.config.return_dict) is False:
            return original(*args, **kwargs), None
        keys = self._keys(named)
        if keys is None:
            output = original(*args, **kwargs)
            return output, self._encoded(named, output, None)
        known = {key: self.kept.get(key) for key in dict.fromkeys(keys)}
        new = [keys.index(key) for key, found in known.items() if found is None]
        if len(new) == len(keys) or (new and not self._can_split(named)):
            output = original(*args, **kwargs)
            return output, self._encoded(named, output, keys)
        if new:
            part = self._family.part(self._body.config, named, new)
            made = self._encoded(part, original(**part), [keys[image] for image in new])
            known.update(zip([keys[image] for image in new], made.images, strict=True))
        images = [found for key in keys if (found := known[key]) is not None]
        assert len(images) == len(keys), "an image was not encoded"
        self.num_reused += len(keys) - len(new)
        # copies: whoever writes into what a model returned must not change what comes next
        tensors = [image.features.clone() for image in images]
        return BaseModelOutputWithPooling(pooler_output=tensors), Encoded(tensors, images)

    def _can_split(self, named: Mapping[str, Any]) -> bool:
        return self._family.can_split(self._body.config, named)

    def _names(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        named = dict(self._signature.bind(*args, **kwargs).arguments)
        more = named.pop("kwargs", {})
        return {**named, **more}

    def _keys(self, named: Mapping[str, Any]) -> list[bytes] | None:
        """Returns a key for each image; None where features cannot be told by what is passed."""
        body, config, family = self._body, self._body.config, self._family
        wants_more = named.get("output_hidden_states") or named.get("output_attentions")
        if not self._capacity or wants_more or body.training or torch.is_grad_enabled():
            return None
        known = {*family.settings, *family.own, *_HARMLESS}
        rest = {name: value for name, value in named.items() if name not in known}
        if any(not isinstance(value, bool | int | str | None) for value in rest.values()):
            return None
        stamp = weights_stamp(*_modules(body))
        if stamp is None:
            return None
        tower = config.vision_config
        self.kept.check((stamp, tower._attn_implementation))
        cast = torch.is_autocast_enabled(named["pixel_values"].device.type)
        settings = [setting(config, named, name) for name in family.settings]
        common = (settings, sorted(rest.items()), cast and torch.get_autocast_dtype("cpu"))
        pixels = family.pixels(config, named)
        return [
            image_key(own, family.facts(config, named, image), common)
            for image, own in enumerate(pixels)
        ]

    def _encoded(
        self, named: Mapping[str, Any], output: Any, keys: Sequence[bytes] | None
    ) -> Encoded:
        """Notes the images of a call that ran; they are kept where they have keys."""
        config, family = self._body.config, self._family
        tensors = list(output.pooler_output)
        output.pooler_output = tensors  # the very ones, also where it was one tensor
        self.num_encoded += len(tensors)
        hidden = family.hidden(config, named, output)
        pixels = family.pixels(config, named) if self.keeps_pixels else [None] * len(tensors)
        images = []
        for image, features in enumerate(tensors):
            views = family.views(config, named, image, len(features))
            state = None if hidden is None else hidden[image]
            if state is not None and len(state) != len(features):
                state = None
            images.append(_own(features, state, views, pixels[image]))
            if keys is not None:
                self.kept.put(keys[image], images[-1])
        return Encoded(tensors, images)


def _own(
    features: torch.Tensor, hidden: torch.Tensor | None, views: Any, pixels: torch.Tensor | None
) -> ImageFeatures:
    # views of a batch would keep all of it
    state = None if hidden is None else hidden.detach().clone()
    seen = None if pixels is None else pixels.detach().clone()
    return ImageFeatures(features.detach().clone(), state, views, seen)


def _modules(body: PreTrainedModel) -> list[torch.nn.Module]:
    tower = [getattr(body, name, None) for name in ("vision_tower", "multi_modal_projector")]
    newline = getattr(body, "image_newline", None)
    lone = [] if newline is None else [torch.nn.ParameterList([newline])]
    return [*(part for part in tower if part is not None), *lone]
