"""Where the tokens of images lie in a text, and which grid of patches each of them is. Plain integers, no tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from oval_core.config import check_int
from oval_core.errors import ConfigError

__all__ = ["Grid", "ImageSpan", "find_spans"]


@dataclass(frozen=True, slots=True)
class Grid:
    """Image tokens in reading order.

    Attributes:
        rows: of patches.
        cols: of patches.
        newline: whether one more token ends each row, as LLaVA-NeXT and OneVision have it.
    """

    rows: int
    cols: int
    newline: bool = False

    def __post_init__(self) -> None:
        check_int("grid rows", self.rows, 1, None)
        check_int("grid cols", self.cols, 1, None)

    @property
    def width(self) -> int:
        """Tokens of a row."""
        return self.cols + int(self.newline)

    @property
    def size(self) -> int:
        """Tokens in all."""
        return self.rows * self.width


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Consecutive tokens of a text that are one grid of one image.

    Attributes:
        start: its first token.
        length: tokens of it that the text has: `grid.size`, or less where the text ends within it.
        image: number of the image in the text, from 0; the grids of one image share it.
        grid: its patches.
    """

    start: int
    length: int
    image: int
    grid: Grid


def find_spans(
    ids: Sequence[int], image_token_id: int, grids: Sequence[Grid | Sequence[Grid]]
) -> tuple[ImageSpan, ...]:
    """Returns the spans of the images in a text, in order.

    Args:
        ids: of the text.
        image_token_id: id of every image token. Images may follow each other without a text between them: their sizes
            tell them apart.
        grids: of each image, in order. An image of several grids (a class token and a grid, or an overview and its
            parts) gives a span for each.
    Raises:
        ConfigError: there are more or fewer image tokens than the grids have, or an image does not end where its
            tokens do.
    """
    images = [(own,) if isinstance(own, Grid) else tuple(own) for own in grids]
    wanted = sum(grid.size for own in images for grid in own)
    found = sum(token == image_token_id for token in ids)
    if found != wanted:
        raise ConfigError(
            f"image tokens: got {found} in a text with {len(images)} images. Allowed: {wanted}, the sizes of these "
            "images. Pass the images that the text names."
        )
    runs = _runs(ids, image_token_id)
    spans: list[ImageSpan] = []
    start = end = 0
    for image, own in enumerate(images):
        for grid in own:
            if start == end:
                start, end = next(runs)
            if grid.size > end - start:
                raise ConfigError(
                    f"image tokens: got {end - start} in a row for a grid of {grid.rows} x {grid.cols} of image {image}. "
                    f"Allowed: {grid.size} without text between them. Pass the images in the order of the text."
                )
            spans.append(ImageSpan(start, grid.size, image, grid))
            start += grid.size
    return tuple(spans)


def _runs(ids: Sequence[int], wanted: int) -> Iterator[tuple[int, int]]:
    """Yields [start, end) of each run of a token."""
    start = None
    for place, token in enumerate(ids):
        if token == wanted and start is None:
            start = place
        elif token != wanted and start is not None:
            yield start, place
            start = None
    if start is not None:
        yield start, len(ids)
