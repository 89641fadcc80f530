"""`Vision`: what attach adds to a model that sees images. Tells each decoder forward which of its columns are images."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from oval_adapters.families.llava import LlavaImages, guess_views
from oval_adapters.hf_cache import OvalCache
from oval_adapters.patch import Patch
from oval_adapters.vision.encoder import Encoded, ImageEncoder
from oval_adapters.vision.feature_cache import ImageFeatures
from oval_adapters.vision.placement import Parts, cut_parts, place_images, place_runs
from oval_core.errors import ConfigError, OvalError
from oval_core.metrics import CacheCounters
from oval_core.vision_config import VisionConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Vision"]


@dataclass(slots=True, eq=False)
class _Generation:
    """A `generate` on OVAL: its prompt, and the images that it encoded before the first forward."""

    prompt: torch.Tensor | None
    cached: int
    encoded: list[Encoded] = field(default_factory=list)
    layout: tuple[torch.Tensor, list[Parts]] | None = None  # of the new columns of the prompt


@dataclass(slots=True, eq=False)
class _BodyCall:
    """A forward of the model around the decoder, on an OVAL cache."""

    named: dict[str, Any]
    encoded: list[Encoded] = field(default_factory=list)


class _ThreadState(threading.local):
    generation: _Generation | None = None
    body: _BodyCall | None = None


class Vision:
    """Follows the model around a decoder: `get_image_features` and `forward`."""

    def __init__(
        self,
        body: PreTrainedModel,
        family: LlavaImages,
        config: VisionConfig,
        counters: CacheCounters,
    ) -> None:
        """Looks at a model; `install` changes it.

        Args:
            body: the model around the decoder.
            family: facts of its images.
            config: settings.
            counters: totals of the caches, the pages of images among them.
        """
        self._body, self._config, self._counters = body, config, counters
        self._encoder = ImageEncoder(body, family, config.reuse_images)
        self._thread = _ThreadState()
        self._signature = inspect.signature(body.forward)

    def install(self) -> list[Patch]:
        """Wraps the model's methods; the patches are to be undone in reverse order."""
        return [
            Patch(self._body, "get_image_features", self._wrap_encoder),
            Patch(self._body, "forward", self._wrap_forward),
        ]

    @contextlib.contextmanager
    def generating(self, prompt: torch.Tensor | None, cached: int) -> Iterator[None]:
        """Marks that `generate` runs with an OVAL cache.

        Args:
            prompt: ids [B, L] or embeddings [B, L, C] that it was given.
            cached: columns that the cache holds already.
        """
        before, self._thread.generation = self._thread.generation, _Generation(prompt, cached)
        try:
            yield
        finally:
            self._thread.generation = before

    def parts(self, num_queries: int, cached: int) -> list[Parts]:
        """Returns by row where images lie in the running decoder forward [B, T]; nothing where it is all text."""
        call = self._thread.body
        if call is None:
            return []
        tensors = self._features(call)
        if not tensors:
            return []
        mask = self._mask(call.named.get("input_ids"), call.named.get("inputs_embeds"))
        if mask.shape[1] != num_queries:
            return []
        known = self._known(tensors, call)
        if known is not None:
            rows = place_images(mask, known)
            if rows is not None:
                return rows
        rows = self._of_prompt(mask, cached)
        if rows is not None:
            return rows
        guessed = [ImageFeatures(own, None, guess_views(len(own))) for own in tensors]
        rows = place_images(mask, guessed)
        return rows if rows is not None else place_runs(mask, torch.cat(tensors))

    def ids(self, num_queries: int) -> torch.Tensor | None:
        """Returns the ids [B, T] of the running decoder forward; None where nobody told."""
        call = self._thread.body
        ids: torch.Tensor | None = None if call is None else call.named.get("input_ids")
        return ids if ids is not None and ids.shape[1] == num_queries else None

    def is_turn(self, num_queries: int, cached: int) -> bool:
        """Returns whether a forward begins a new turn on a cache that holds a text, and not just its next token."""
        generation = self._thread.generation
        if generation is None:
            return cached > 0 and num_queries > 1
        prompt = generation.prompt
        begins = prompt is not None and cached == generation.cached > 0
        return begins and prompt.shape[1] - cached > 1

    def keeps_pixels(self) -> None:
        """Lets images keep their pixels beside their features."""
        self._encoder.keeps_pixels = True

    def stats(self) -> dict[str, int]:
        """Returns how many images were encoded and reused, and how many pages images took."""
        return {
            "images_encoded": self._encoder.num_encoded,
            "images_reused": self._encoder.num_reused,
            "image_pages": self._counters.image_pages,
        }

    def clear(self) -> None:
        """Forgets the features of every image."""
        self._encoder.kept.clear()

    def _wrap_encoder(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_image_features(*args: Any, **kwargs: Any) -> Any:
            state = self._thread
            if state.body is None and state.generation is None:
                return original(*args, **kwargs)
            output, encoded = self._encoder.encode(original, args, kwargs)
            if encoded is not None and state.body is not None:
                state.body.encoded.append(encoded)
            elif encoded is not None and state.generation is not None:
                state.generation.encoded.append(encoded)
            return output

        return get_image_features

    def _wrap_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            named = dict(zip(self._signature.parameters, args, strict=False)) | kwargs
            cache = named.get("cache", named.get("past_key_values"))
            before = self._thread.body
            sees = isinstance(cache, OvalCache) and not cache.is_held
            self._thread.body = call = _BodyCall(named) if sees else None
            try:
                return original(*args, **kwargs)
            except ValueError as error:
                if call is not None and not isinstance(error, OvalError):
                    self._check_counts(call)
                raise
            finally:
                self._thread.body = before

        return forward

    def _check_counts(self, call: _BodyCall) -> None:
        """Says of a forward that failed whether text and images disagree, in tokens: the model counts features times C."""
        sizes = [len(tensor) for tensor in self._features(call)]
        ids, embeds = call.named.get("input_ids"), call.named.get("inputs_embeds")
        if not sizes or (ids is None and embeds is None):
            return
        count = int(self._mask(ids, embeds).sum())
        if count != sum(sizes):
            raise ConfigError(
                f"images: got {count} image tokens in the text, and features of {sum(sizes)} tokens from {len(sizes)} images. "
                "Allowed: as many of both. Make text and pixels by one call of the processor."
            )

    def _features(self, call: _BodyCall) -> list[torch.Tensor]:
        """Returns the features that the running forward puts in place of image tokens."""
        if call.encoded:
            return list(call.encoded[-1].tensors)
        given = (call.named.get("mm_encoder_outputs") or {}).get("image")
        features = getattr(given, "pooler_output", None)
        return [] if features is None else list(features)

    def _known(self, tensors: list[torch.Tensor], call: _BodyCall) -> list[ImageFeatures] | None:
        generation = self._thread.generation
        encoded = [*call.encoded, *(generation.encoded if generation is not None else [])]
        image_of = {
            id(tensor): image
            for own in encoded
            for tensor, image in zip(own.tensors, own.images, strict=True)
        }
        found = [image_of.get(id(tensor)) for tensor in tensors]
        images = [image for image in found if image is not None]
        return images if len(images) == len(tensors) else None

    def _of_prompt(self, mask: torch.Tensor, cached: int) -> list[Parts] | None:
        """Looks a piece of a prompt up in the whole of it: an image may go on in the next piece.

        Args:
            mask: bool [B, T] which columns are image tokens.
            cached: columns before.
        """
        generation = self._thread.generation
        if generation is None or generation.prompt is None or not generation.encoded:
            return None
        if generation.layout is None:
            generation.layout = self._layout(generation)
        new, rows = generation.layout
        start = cached - generation.cached
        here = new[:, start : start + mask.shape[1]]
        if not len(here) or len(mask) % len(here):
            return None
        repeats = len(mask) // len(here)  # beams
        if not torch.equal(here.repeat_interleave(repeats, 0), mask):
            return None
        cut = [cut_parts(own, start, start + mask.shape[1]) for own in rows]
        return [own for own in cut for _ in range(repeats)]

    def _layout(self, generation: _Generation) -> tuple[torch.Tensor, list[Parts]]:
        prompt = generation.prompt
        assert prompt is not None, "no prompt"
        mask = self._mask(prompt, None) if prompt.ndim == 2 else self._mask(None, prompt)
        if generation.cached < mask.shape[1]:
            mask = mask[:, generation.cached :]
        rows = place_images(mask, generation.encoded[-1].images)
        return (mask, rows) if rows is not None else (mask[:0], [])

    def _mask(self, ids: torch.Tensor | None, embeds: torch.Tensor | None) -> torch.Tensor:
        """Returns which columns are image tokens, bool [B, T], as the model finds them."""
        token: int = self._body.config.image_token_id
        if ids is not None:
            return ids.eq(token).cpu()
        assert embeds is not None, "neither ids nor embeddings"
        wanted = self._body.get_input_embeddings()(torch.tensor(token, device=embeds.device))
        return embeds.eq(wanted).all(-1).cpu()
