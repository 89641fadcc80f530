"""Chooses the image pages that a prompt reads, within a budget, over all images of a row, old and new ones.

Shapes: B rows, T columns of a forward, P pages of a row's images, C the decoder's hidden size, D of CLIP.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from oval_adapters.vision.placement import ImagePart, ImageView, Parts
from oval_adapters.vision.unread import PlacedView, UnreadImages
from oval_core.errors import UnsupportedModelError
from oval_mm.budget import ImageBudget, choose_pages
from oval_mm.page_choice import ImagePages, ImagePageScorer, QuestionPages
from oval_mm.spans import Grid
from oval_mm.tiles import tile_pages

if TYPE_CHECKING:
    from oval_adapters.vision.prefill_clip import PromptVectors

__all__ = ["PrefillChoice", "PrefillCounters", "Prompt", "RowChoice"]


@dataclass(slots=True)
class PrefillCounters:
    """What was read of images, over all caches.

    Attributes:
        image_pages_seen: image pages of prompts.
        image_tokens_seen: image tokens of prompts.
        image_tokens_read: of those, what the decoder read at once.
        image_tokens_materialised: of the others, what it read later.
        router_seconds: time that choosing took.
    """

    image_pages_seen: int = 0
    image_tokens_seen: int = 0
    image_tokens_read: int = 0
    image_tokens_materialised: int = 0
    router_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """The new columns of a forward.

    Attributes:
        embeds: [B, T, C] what the decoder gets.
        real: bool [B, T] which columns are no padding, on the CPU.
        images: by row; nothing for a row of text.
        ids: long [B, T]; None where only embeddings were given.
    """

    embeds: torch.Tensor
    real: torch.Tensor
    images: Sequence[Parts]
    ids: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class RowChoice:
    """What a row does not read, and what it wants besides.

    Attributes:
        unread: its new columns that stay unread.
        wanted: by view of an earlier prompt, the places that it wants to have read, ascending.
    """

    unread: list[int]
    wanted: dict[PlacedView, list[int]]


@dataclass(frozen=True, slots=True, eq=False)
class _Page:
    """One page to choose: of a new part, or of a view that came before."""

    source: ImagePart | PlacedView
    places: tuple[int, ...]
    image: int


class PrefillChoice:
    """Scores pages and spends the budget.

    Args:
        budget: of each row.
        scorer: of its pages.
        tile: patches on a side of a page.
        vectors: makes what scorers with `needs_clip` read; None for others.
    """

    def __init__(
        self,
        budget: ImageBudget,
        scorer: ImagePageScorer,
        tile: int,
        vectors: PromptVectors | None = None,
    ) -> None:
        self.budget, self.scorer, self.vectors = budget, scorer, vectors
        self._tile = tile
        self.counters = PrefillCounters()

    def choose(self, prompt: Prompt, before: UnreadImages) -> list[RowChoice]:
        """Returns by row what to read of its images, those of earlier prompts with those of this one."""
        start = time.perf_counter()
        rows = range(len(prompt.embeds))
        chosen = [self._row(prompt, row, before.row(row)) for row in rows]
        self.counters.router_seconds += time.perf_counter() - start
        seen = sum(
            int(prompt.real[row, part.column : part.column + part.length].sum())
            for row in rows
            for part in _of(prompt, row)
        )
        parts = [part for row in rows for part in _of(prompt, row) if part.first == 0]
        self.counters.image_pages_seen += sum(len(_tiles(part.view.grid, self._tile)) for part in parts)  # fmt: skip
        self.counters.image_tokens_seen += seen
        self.counters.image_tokens_read += seen - sum(len(own.unread) for own in chosen)
        return chosen

    def _row(self, prompt: Prompt, row: int, before: Sequence[PlacedView]) -> RowChoice:
        if self.budget.is_whole and not before:
            return RowChoice([], {})
        new = [part for part in _of(prompt, row) if _is_whole(part, prompt.real[row])]
        pages = self._pages([*before, *new])
        if not pages or self.budget.is_whole:
            return self._told(pages, [True] * len(pages))
        sizes = [len(page.places) for page in pages]
        scores = self._scores(prompt, row, [*before, *new])
        assert scores.shape == (len(pages),), "a score a page"
        last = int(prompt.real[row].nonzero()[-1]) if bool(prompt.real[row].any()) else -1
        for index, page in enumerate(pages):
            part = page.source
            if isinstance(part, ImagePart) and last - part.column in page.places:
                scores[index] = float("inf")  # what the next token is predicted from is always read
        images = [page.image for page in pages]
        kept: list[bool] = choose_pages(scores, sizes, images, self.budget).tolist()
        kept = [own or bool(scores[index] == float("inf")) for index, own in enumerate(kept)]
        return self._told(pages, kept)

    @staticmethod
    def _told(pages: Sequence[_Page], kept: Sequence[bool]) -> RowChoice:
        unread: list[int] = []
        wanted: dict[PlacedView, list[int]] = {}
        for page, own in zip(pages, kept, strict=True):
            if isinstance(page.source, ImagePart) and not own:
                unread += [page.source.column + place for place in page.places]
            elif isinstance(page.source, PlacedView) and own:
                wanted.setdefault(page.source, []).extend(page.places)
        return RowChoice(sorted(unread), {view: sorted(own) for view, own in wanted.items()})

    def _pages(self, sources: Sequence[ImagePart | PlacedView]) -> list[_Page]:
        pages, number = [], -1
        before: ImageView | None = None
        for source in sources:
            view = source.view
            if before is None or view.image is not before.image:
                number += 1
            before = view
            pages += [_Page(source, own, number) for own in _tiles(view.grid, self._tile)]  # fmt: skip
        return pages

    def _scores(
        self, prompt: Prompt, row: int, sources: Sequence[ImagePart | PlacedView]
    ) -> torch.Tensor:
        columns = question_columns(prompt, row)
        views = [source.view for source in sources]
        question, clip = None, [None] * len(views)
        if self.scorer.needs_clip:
            assert self.vectors is not None, "checked when made"
            if prompt.ids is None:
                raise UnsupportedModelError(
                    f"vision.router: {self.scorer.name!r} reads the words of a question. Got embeddings without ids. "
                    "Allowed: input_ids. Pass these, or choose a router that reads no words."
                )
            question = self.vectors.question(prompt.ids[row, columns].tolist())
            clip = [self.vectors.pages(view, self._tile) for view in views]
        images = [
            ImagePages(
                features=view.features,
                pages=_tiles(view.grid, self._tile),
                shape=(view.grid.rows, view.grid.width),
                clip=own,
            )
            for view, own in zip(views, clip, strict=True)
        ]
        text = prompt.embeds[row, columns.to(prompt.embeds.device)]
        return self.scorer.score(QuestionPages(text=text, images=images, question=question)).clone()


def question_columns(prompt: Prompt, row: int) -> torch.Tensor:
    """Returns the columns of the text that asks: what follows the last image, else all text, else all that is there."""
    text = prompt.real[row].clone()
    parts = _of(prompt, row)
    for part in parts:
        text[part.column : part.column + part.length] = False
    after = text.clone()
    if parts:
        after[: parts[-1].column] = False
    for columns in (after, text, prompt.real[row]):
        if bool(columns.any()):
            return columns.nonzero()[:, 0]
    return torch.arange(prompt.real.shape[1])


@functools.lru_cache(maxsize=64)
def _tiles(grid: Grid, tile: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(page) for page in tile_pages(grid, tile))


def _of(prompt: Prompt, row: int) -> Parts:
    return prompt.images[row] if row < len(prompt.images) else ()


def _is_whole(part: ImagePart, real: torch.Tensor) -> bool:
    """Whether a forward has a whole view; pieces of one are read."""
    whole = part.length == part.view.grid.size
    return whole and bool(real[part.column : part.column + part.length].all())
