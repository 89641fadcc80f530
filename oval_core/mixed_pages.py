"""Puts the new tokens of one row into pages: text into text pages, each image into its own. Plain integers."""

from __future__ import annotations

from collections.abc import Iterator

from oval_core.page_table import PageTable
from oval_core.values import ImageSet, RowRequest


def row_regions(table: PageTable, row: int, request: RowRequest) -> list[int]:
    """Returns the sizes of the regions that `append_row` will take."""
    if not request.images:
        return table.text_regions(row, request.num_new)
    regions: list[int] = []
    room = table.room(row)
    for part, closes in _parts(request):
        if isinstance(part, ImageSet):
            regions += [len(group) for group in part.groups]
            room = 0
            continue
        left = max(part - room, 0)
        full, rest = divmod(left, table.page_size)
        regions += [table.page_size] * full
        if rest:
            regions.append(rest if closes else table.page_size)
        room = 0
    return regions


def append_row(table: PageTable, row: int, request: RowRequest) -> list[int]:
    """Appends the row's new tokens, tentatively; returns their slots in token order."""
    if not request.images:
        return table.append(row, request.num_new).slots
    slots: list[int] = []
    for part, closes in _parts(request):
        if isinstance(part, ImageSet):
            slots += table.append_sets(row, part.groups).slots
        else:
            slots += table.append(row, part, closes=closes).slots
    return slots


def _parts(request: RowRequest) -> Iterator[tuple[int | ImageSet, bool]]:
    """Yields texts (their lengths) and images in order, each with whether an image comes later."""
    done = 0
    for image in request.images:
        if image.first > done:
            yield image.first - done, True
        yield image, True
        done = image.first + image.size
    if request.num_new > done:
        yield request.num_new - done, False
