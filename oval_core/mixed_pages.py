"""Puts the new tokens of one row into pages: text into text pages, each image into its own. Plain integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from oval_core.page_table import PageTable
from oval_core.pages import Page
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


def closed_tails(table: PageTable, requests: Sequence[RowRequest]) -> list[Page]:
    """Returns the open pages that an image closes before they take another token."""
    return [
        seq.tail
        for seq, request in zip(
            table.sequences, requests, strict=False
        )  # a closed cache is refused later
        if seq.tail is not None and request.images and request.images[0].first == 0
    ]


def slots_taken(table: PageTable, row: int, counts: Sequence[int]) -> int:
    """Returns the slots of a row's new pages and of its open page, if that goes on.

    Args:
        table: its sequences may be yet to come.
        row: which.
        counts: lengths of new texts and images in turn, a text first and last, which may be empty.
    """
    tail = table.sequences[row].tail if row < len(table.sequences) else None
    goes_on = tail is not None and (counts[0] > 0 or len(counts) == 1)
    taken = tail.capacity if tail is not None and goes_on else 0
    room = len(tail.vacant()) if tail is not None else 0
    *before, last = counts
    for place, count in enumerate(before):
        taken += count if place % 2 else max(count - room, 0)
        room = 0
    pages = -(-max(last - room, 0) // table.page_size)
    return taken + pages * table.page_size


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
