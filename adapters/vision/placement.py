"""Says which columns of a forward are which image's. Knows masks and sizes, no cache.

Shapes: B rows, T columns of a forward, n tokens of a view, C the decoder's hidden size, D the vision tower's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oval_adapters.families.llava import guess_views
from oval_adapters.vision.feature_cache import ImageFeatures
from oval_core.errors import ConfigError
from oval_mm.spans import Grid, find_spans

__all__ = ["ImagePart", "ImageView", "Parts", "cut_parts", "place_images", "place_runs"]


@dataclass(frozen=True, slots=True, eq=False)
class ImageView:
    """One grid of one image; two views are the same only if they are the same object.

    Attributes:
        grid: its patches.
        features: [n, C] projected.
        hidden: [n, D] states of the vision tower, or None.
        image: the same object for all views of one image where it was placed.
        source: what the image became, of which this is a part.
    """

    grid: Grid
    features: torch.Tensor
    hidden: torch.Tensor | None
    image: object
    source: ImageFeatures


@dataclass(frozen=True, slots=True)
class ImagePart:
    """Columns [column, column + length) of a row hold the places from `first` on of a view."""

    column: int
    length: int
    first: int
    view: ImageView


Parts = tuple[ImagePart, ...]
"""Images of one row of a forward, in order."""


def place_images(mask: torch.Tensor, images: Sequence[ImageFeatures]) -> list[Parts] | None:
    """Shares images out to rows as a model does: in order, row after row.

    Args:
        mask: bool [B, T] which columns are image tokens.
        images: all of them.
    Returns:
        By row; None where they do not fit, as when a forward begins within an image.
    """
    counts = mask.sum(1).tolist()
    waiting = list(images)
    rows: list[Parts] = []
    for own, count in zip(mask, counts, strict=True):
        mine: list[ImageFeatures] = []
        while count > 0 and waiting:
            mine.append(waiting.pop(0))
            count -= len(mine[-1].features)
        try:
            rows.append(_row(own, mine))
        except ConfigError:
            return None
    return None if waiting else rows


def place_runs(mask: torch.Tensor, features: torch.Tensor) -> list[Parts]:
    """Places features [n, C] of which nothing else is known: each run of image tokens passes for one image."""
    rows: list[Parts] = []
    start = 0
    for own in mask:
        sizes = _run_sizes(own)
        images = []
        for size in sizes:
            part = features[start : start + size]
            images.append(ImageFeatures(part, None, guess_views(size)))
            start += size
        rows.append(_row(own, images))
    return rows


def cut_parts(parts: Parts, start: int, end: int) -> Parts:
    """Returns what of the parts lies in columns [start, end), counted from `start`."""
    cut = []
    for part in parts:
        low, high = max(start, part.column), min(end, part.column + part.length)
        if low < high:
            first = part.first + low - part.column
            cut.append(ImagePart(low - start, high - low, first, part.view))
    return tuple(cut)


def _row(mask: torch.Tensor, images: Sequence[ImageFeatures]) -> Parts:
    if not images and not bool(mask.any()):
        return ()
    spans = find_spans(mask.int().tolist(), 1, [image.views for image in images])
    views = [view for image in images for view in _views(image)]
    return tuple(
        ImagePart(span.start, span.length, 0, view) for span, view in zip(spans, views, strict=True)
    )


def _views(image: ImageFeatures) -> list[ImageView]:
    sizes = [grid.size for grid in image.views]
    features, placed = image.features.split(sizes), object()
    hidden = [None] * len(sizes) if image.hidden is None else image.hidden.split(sizes)
    return [
        ImageView(grid, own, state, placed, image)
        for grid, own, state in zip(image.views, features, hidden, strict=True)
    ]


def _run_sizes(mask: torch.Tensor) -> list[int]:
    sizes: list[int] = []
    before = False
    for here in mask.tolist():
        if here and before:
            sizes[-1] += 1
        elif here:
            sizes.append(1)
        before = here
    return sizes
