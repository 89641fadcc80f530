"""What images the rows of one cache hold, and where. Follows crop, reorder, copy and reset with the cache's own.

Shapes: n tokens of an image, C the decoder's hidden size, D the vision tower's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from oval_adapters.vision.placement import ImagePart, ImageView
from oval_core.pages import SequencePages
from oval_core.values import ImageSet, RowRequest
from oval_mm.spans import ImageSpan
from oval_mm.tiles import tile_pages

__all__ = ["ImageLog", "RowImage"]


@dataclass(frozen=True, slots=True, eq=False)
class RowImage:
    """One grid of an image that a row of a cache holds. An image of several grids gives several, of one number.

    Attributes:
        span: its tokens among the row's stored ones (padding does not count), and the number of the image in the row.
        pages: ids of its pages, in order. A page holds tokens of this grid only.
        features: [n, C] projected features, one for each of its tokens. Not to be written to.
        hidden: [n, D] states of the vision tower behind them; None where they are not one to one.
    """

    span: ImageSpan
    pages: tuple[int, ...]
    features: torch.Tensor
    hidden: torch.Tensor | None

    def __repr__(self) -> str:
        """Tells sizes of tensors, not their numbers."""
        hidden = None if self.hidden is None else list(self.hidden.shape)
        shapes = f"features={list(self.features.shape)}, hidden={hidden}"
        return f"RowImage({self.span}, {len(self.pages)} pages, {shapes})"


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """Tokens [start, start + len(places)) of a row hold these places of a view."""

    start: int
    places: tuple[int, ...]
    view: ImageView

    @property
    def end(self) -> int:
        return self.start + len(self.places)


class ImageLog:
    """The images of each row, in the order of the text."""

    def __init__(self) -> None:
        self._rows: list[list[_Seen]] = []
        self._pending: list[list[_Seen]] = []
        self._num_pages = 0

    def begin(
        self,
        requests: Sequence[RowRequest],
        images: Sequence[Sequence[ImagePart]],
        lengths: Sequence[int],
        tile: int,
    ) -> list[RowRequest]:
        """Adds to what rows bring the pages of their images; they count when the forward commits.

        Args:
            requests: of a forward.
            images: by row; nothing for a forward of text.
            lengths: tokens of each row before.
            tile: see `VisionConfig`.
        """
        self._pending, self._num_pages = [], 0
        if not any(images):
            return list(requests)
        told = []
        for request, parts, length in zip(requests, images, lengths, strict=True):
            seen, sets = [], []
            for part in parts:
                first, places = _stored(request, part)
                if places:
                    groups = _groups(part.view, places, tile)
                    seen.append(_Seen(length + first, places, part.view))
                    sets.append(ImageSet(first, groups))
                    self._num_pages += len(groups)
            self._pending.append(seen)
            told.append(replace(request, images=tuple(sets)))
        return told

    def commit(self) -> int:
        """Lets the images of the running forward count; returns how many pages they have."""
        pending, self._pending = self._pending, []
        num_pages, self._num_pages = self._num_pages, 0
        for row, seen in enumerate(pending):
            self._grow(row)
            for new in seen:
                self._add(self._rows[row], new)
        return num_pages

    def abort(self) -> None:
        """Forgets the images of the running forward."""
        self._pending, self._num_pages = [], 0

    def crop(self, lengths: Sequence[int]) -> None:
        """Keeps the first lengths[row] tokens of each row."""
        for row, length in enumerate(lengths[: len(self._rows)]):
            self._rows[row] = [
                replace(seen, places=seen.places[: length - seen.start])
                for seen in self._rows[row]
                if seen.start < length
            ]

    def select(self, rows: Sequence[int]) -> None:
        """Makes the rows rows[0], rows[1], ... of the old ones."""
        if self._rows:
            self._grow(max(rows, default=0))
            self._rows = [list(self._rows[row]) for row in rows]

    def reset(self) -> None:
        """Forgets every row."""
        self._rows = []
        self.abort()

    def copy(self) -> ImageLog:
        """Returns an independent copy."""
        twin = ImageLog()
        twin._rows = [list(own) for own in self._rows]
        return twin

    def images(self, sequences: Sequence[SequencePages]) -> tuple[tuple[RowImage, ...], ...]:
        """Returns by row what it holds.

        Args:
            sequences: the pages of each row.
        """
        found = []
        for row, seq in enumerate(sequences):
            own = self._rows[row] if row < len(self._rows) else []
            numbers = _numbers(own)
            found.append(
                tuple(_row_image(seen, n, seq) for seen, n in zip(own, numbers, strict=True))
            )
        return tuple(found)

    def _grow(self, row: int) -> None:
        while len(self._rows) <= row:
            self._rows.append([])

    @staticmethod
    def _add(own: list[_Seen], new: _Seen) -> None:
        last = own[-1] if own else None
        goes_on = last is not None and last.view is new.view and last.end == new.start
        if last is not None and goes_on and last.places[-1] < new.places[0]:
            own[-1] = replace(last, places=last.places + new.places)
        else:
            own.append(new)


def _stored(request: RowRequest, part: ImagePart) -> tuple[int, tuple[int, ...]]:
    """Returns the place of a part's first token among the row's new ones, and which of its places are no padding."""
    if request.query_places is None:
        return part.column, tuple(range(part.first, part.first + part.length))
    columns = request.query_places.tolist()
    mine = [
        (place, column)
        for place, column in enumerate(columns)
        if part.column <= column < part.column + part.length
    ]
    if not mine:
        return 0, ()
    return mine[0][0], tuple(part.first + column - part.column for _, column in mine)


def _groups(view: ImageView, places: Sequence[int], tile: int) -> tuple[tuple[int, ...], ...]:
    rank = {place: index for index, place in enumerate(places)}
    pages = [[rank[place] for place in page if place in rank] for page in tile_pages(view.grid, tile)]  # fmt: skip
    return tuple(tuple(page) for page in pages if page)


def _numbers(own: Sequence[_Seen]) -> list[int]:
    """Numbers the images: views of one image have one number."""
    numbers: list[int] = []
    for before, seen in zip([None, *own], own, strict=False):
        is_next = before is not None and before.view.image is not seen.view.image
        numbers.append(numbers[-1] + int(is_next) if numbers else 0)
    return numbers


def _row_image(seen: _Seen, number: int, seq: SequencePages) -> RowImage:
    pages = tuple(
        page.page_id
        for page in seq.pages
        if page.kind == "image" and seen.start <= page.tokens[0] < seen.end
    )
    view, count = seen.view, len(seen.places)
    features, hidden = view.features, view.hidden
    if count < view.grid.size:
        places = torch.tensor(seen.places, device=features.device)
        features = features[places]
        hidden = None if hidden is None else hidden[places.to(hidden.device)]
    return RowImage(ImageSpan(seen.start, count, number, view.grid), pages, features, hidden)
