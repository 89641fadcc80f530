"""Routes image tokens before the decoder runs: what a prompt leaves unread, and what a later turn has read after all.

Shapes: B rows, T columns of a forward, C the decoder's hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from oval_adapters.vision.filling import Filling, Wanted, make_filling
from oval_adapters.vision.prefill_choice import PrefillChoice, Prompt
from oval_adapters.vision.unread import UnreadImages

if TYPE_CHECKING:
    from oval_adapters.hf_cache import OvalCache
    from oval_adapters.vision.placement import Parts
    from oval_adapters.vision.prefill_clip import PromptVectors
    from oval_adapters.vision.vision import Vision
    from oval_mm.page_choice import ImagePageScorer

__all__ = ["PrefillRouting"]

Run = Callable[[Filling], None]


class PrefillRouting:
    """Chooses, for each forward of a prompt, the image tokens that the decoder gets."""

    def __init__(self, choice: PrefillChoice, vision: Vision) -> None:
        """Routes by `choice`; `vision` knows what runs."""
        self._choice, self._vision = choice, vision

    def use(self, scorer: ImagePageScorer, vectors: PromptVectors | None = None) -> None:
        """Scores pages by another scorer from now on.

        Args:
            scorer: in place of the one of the settings.
            vectors: for a scorer with `needs_clip`; see `oval_adapters.vision.prefill_settings.prompt_vectors`.
        """
        assert vectors is not None or not scorer.needs_clip, "the scorer needs vectors"
        self._choice.scorer, self._choice.vectors = scorer, vectors

    def stats(self) -> dict[str, Any]:
        """Returns what was read and what choosing took."""
        return {"image_router": self._choice.scorer.name, **asdict(self._choice.counters)}

    def plan(
        self, cache: OvalCache, named: dict[str, Any], images: Sequence[Parts], run: Run
    ) -> torch.Tensor | None:
        """Returns which new columns stay unread, bool [B, T], or None for none; reads what a new turn wants before it.

        Args:
            cache: that the forward is for.
            named: the decoder's arguments.
            images: by row, which new columns are images.
            run: reads unread tokens.
        """
        embeds, mask = named.get("inputs_embeds"), named.get("attention_mask")
        if cache.is_held or embeds is None or (mask is not None and mask.ndim != 2):
            return None
        num_queries, cached = embeds.shape[1], cache.get_seq_length()
        goes_on = self._vision.is_turn(num_queries, cached) and not cache.image_views.is_empty
        if not any(images) and not goes_on:
            return None
        real = torch.ones(embeds.shape[:2], dtype=torch.bool)
        if mask is not None:
            real = mask[:, -num_queries:].bool().cpu()
        prompt = Prompt(embeds=embeds, real=real, images=images, ids=self._vision.ids(num_queries))
        before = cache.image_views if goes_on else UnreadImages()
        chosen = self._choice.choose(prompt, before)
        if goes_on:
            self._read(cache, [own.wanted for own in chosen], embeds, run)
        unread = torch.zeros(embeds.shape[:2], dtype=torch.bool)
        for row, own in enumerate(chosen):
            unread[row, own.unread] = True
        return unread if bool(unread.any()) else None

    def read_all(self, cache: OvalCache, like: torch.Tensor, run: Run) -> int:
        """Reads every image token that is unread; returns how many there were.

        Args:
            cache: between two forwards.
            like: a tensor [.., C] of the decoder's dtype and device.
            run: reads unread tokens.
        """
        rows = range(cache.paged.batch_size)
        views = [cache.image_views.row(row) for row in rows]
        return self._read(cache, [{view: range(view.length) for view in own} for own in views], like, run)  # fmt: skip

    def _read(
        self, cache: OvalCache, wanted: Sequence[Wanted], like: torch.Tensor, run: Run
    ) -> int:
        missing = [
            [
                (view, place)
                for view, places in own.items()
                for unread in [cache.unread_columns(row, view.column, view.length)]
                for place in places
                if bool(unread[place])
            ]
            for row, own in enumerate(wanted)
        ]
        width = max(map(len, missing), default=0)
        limit = cache.max_new_tokens(len(missing)) or max(1, width)
        done = 0
        for start in range(0, width, limit):
            parts = []
            for own in missing:
                part: dict[Any, list[int]] = {}
                for view, place in own[start : start + limit]:
                    part.setdefault(view, []).append(place)
                parts.append(part)
            filling = make_filling(parts, like)
            if filling is not None:
                run(filling)
                done += filling.num_tokens
        self._choice.counters.image_tokens_materialised += done
        return done
