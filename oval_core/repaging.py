"""Plans how the tokens of a sequence are put into other pages while their K/V stay where they are. Plain integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from oval_core.config import MAX_PAGE_SIZE
from oval_core.pages import Page, SequencePages

PlaceOf = Callable[[Page], int | None]
"""Where the K/V of a page lie, as an offset to its slots, in a memory that has places of its own; None: it must stay."""


@dataclass(frozen=True, slots=True)
class Repaged:
    """Pages `new` that took over the tokens and the slots of pages `old`; both in the order of the sequence."""

    old: tuple[Page, ...]
    new: tuple[Page, ...]


@dataclass(frozen=True, slots=True)
class PageShape:
    """A page to be: its tokens from `first_token` on, in the slots from `base` on; the rest of its region is vacant."""

    first_token: int
    size: int
    base: int
    capacity: int
    sealed: bool

    def fill(self, page: Page) -> None:
        """Puts the tokens into an empty page over this region."""
        page.slots = list(range(self.base, self.base + self.size))
        page.tokens = list(range(self.first_token, self.first_token + self.size))
        page.sealed = self.sealed


@dataclass(frozen=True, slots=True)
class Repaging:
    """seq.pages[start:end] become pages of these shapes."""

    start: int
    end: int
    shapes: tuple[PageShape, ...]


def at_home(page: Page) -> int:  # noqa: ARG001
    """The `PlaceOf` where all K/V lie in their slots."""
    return 0


def plan_repaging(
    seq: SequencePages, first_token: int, sizes: Sequence[int], place_of: PlaceOf = at_home
) -> list[Repaging]:
    """Returns what to replace, in the order of the sequence; pages that are already as wanted are left out.

    A wanted page is cut where its slots are not consecutive, where places differ, and at a page that must stay: an image
    page, a shared one, one with tentative tokens, and one without a place.

    Args:
        seq: the sequence.
        first_token: first token of some page.
        sizes: 1..32 each; together they end where some page ends.
        place_of: see `PlaceOf`.
    """
    assert all(1 <= size <= MAX_PAGE_SIZE for size in sizes), "page size out of 1..32"
    borders = list(accumulate(sizes, initial=first_token))
    places = [_place(seq, page, borders, place_of) for page in seq.pages]
    found: list[Repaging] = []
    start = 0
    for index in range(len(seq.pages) + 1):
        if index < len(seq.pages) and places[index] is not None:
            continue
        if start < index:  # seq.pages[start:index] may change
            found += _replace(seq, start, index, _shapes(seq, start, places[start:index], borders))
        start = index + 1
    return found


def _place(seq: SequencePages, page: Page, borders: Sequence[int], place_of: PlaceOf) -> int | None:
    first, end = min(page.tokens), max(page.tokens) + 1
    if end <= borders[0] or first >= borders[-1]:
        return None
    assert borders[0] <= first, "the first token is not the first of a page"
    assert end <= borders[-1], "the sizes end within a page"
    may_change = page.kind == "text" and page.num_refs == 1 and end <= seq.num_committed
    return place_of(page) if may_change else None


def _shapes(
    seq: SequencePages, start: int, places: Sequence[int | None], borders: Sequence[int]
) -> list[PageShape]:
    wanted = set(borders)
    starts: list[tuple[int, int]] = []  # (token, slot)
    before = None  # (place, slot) of the token before
    for page, place in zip(seq.pages[start:], places, strict=False):
        for token, slot in zip(page.tokens, page.slots, strict=True):
            if token in wanted or before != (place, slot - 1):
                starts.append((token, slot))
            before = (place, slot)
    end = seq.pages[start + len(places) - 1].tokens[-1] + 1
    shapes = []
    for (token, slot), (after, _) in pairwise([*starts, (end, 0)]):
        shapes.append(PageShape(token, after - token, slot, after - token, True))
    if start + len(places) == len(seq.pages) and seq.tail is not None:
        shapes[-1] = _with_room(shapes[-1], seq.tail)
    return shapes


def _with_room(last: PageShape, tail: Page) -> PageShape:
    # The open page keeps the vacant slots behind its last token, and fills them.
    capacity = last.size
    end = tail.base + tail.capacity
    while capacity < MAX_PAGE_SIZE and last.base + capacity < end:
        if last.base + capacity in tail.slots:
            break
        capacity += 1
    return replace(last, capacity=capacity, sealed=last.size == capacity)


def _replace(
    seq: SequencePages, start: int, end: int, shapes: Sequence[PageShape]
) -> list[Repaging]:
    """Cuts pages [start, end) and their shapes into the smallest parts that hold the same tokens."""
    common = {page.tokens[0] for page in seq.pages[start:end]} & {s.first_token for s in shapes}
    page_cuts = [i for i in range(start, end) if seq.pages[i].tokens[0] in common]
    shape_cuts = [i for i, shape in enumerate(shapes) if shape.first_token in common]
    parts = []
    for (first, last), (a, b) in zip(
        pairwise([*page_cuts, end]), pairwise([*shape_cuts, len(shapes)]), strict=True
    ):
        if last - first > 1 or b - a > 1 or not _is_shaped(seq.pages[first], shapes[a]):
            parts.append(Repaging(first, last, tuple(shapes[a:b])))
    return parts


def _is_shaped(page: Page, shape: PageShape) -> bool:
    # one shape for the whole page: so its slots are consecutive
    has = (page.base, page.capacity, len(page), page.sealed)
    return has == (shape.base, shape.capacity, shape.size, shape.sealed)
