"""Lays the accepted tokens of a token tree into the pages that they would have filled alone. Plain integers."""

from __future__ import annotations

from collections.abc import Sequence

from oval_core.page_table import SlotCopy
from oval_core.pages import SequencePages


def fold(seq: SequencePages, accepted: Sequence[int], tight: bool = False) -> SlotCopy:
    """Lets tentative tokens change slots before only these stay; the caller copies K/V, then commits the same ones.

    The token that is the n-th to stay must lie in the page of the n-th tentative one: no page is then left with holes
    behind which the text goes on. Most tokens lie there already, and stay in their slots.

    Args:
        seq: the sequence.
        accepted: places among the tentative tokens, ascending.
        tight: also lay them into the very slots of the first tentative ones, so that order stays what slots say.
    Returns:
        What to copy; K/V of rejected tokens are lost by it.
    """
    if all(rank == place for rank, place in enumerate(accepted)):
        return SlotCopy([], [])
    first = seq.num_committed
    pages = [page for page in seq.pages if page.tokens[-1] >= first]
    seats = [(0, 0)] * seq.num_tentative  # by place: (page, slot)
    for index, page in enumerate(pages):
        for token, slot in zip(page.tokens, page.slots, strict=True):
            if token >= first:
                seats[token - first] = (index, slot)
    seat_of = _seats(seats, accepted, tight)
    moved = [place for place in accepted if seat_of[place] != place]
    if not moved:
        return SlotCopy([], [])
    after: list[list[tuple[int, int]]] = [
        [pair for pair in zip(page.tokens, page.slots, strict=True) if pair[0] < first]
        for page in pages
    ]
    for place, seat in enumerate(seat_of):
        index, slot = seats[seat]
        after[index].append((first + place, slot))
    for page, pairs in zip(pages, after, strict=True):
        page.tokens = [token for token, _ in pairs]
        page.slots = [slot for _, slot in pairs]
        page.version += 1
    seq.changed()
    return SlotCopy([seats[p][1] for p in moved], [seats[seat_of[p]][1] for p in moved])


def _seats(seats: Sequence[tuple[int, int]], accepted: Sequence[int], tight: bool) -> list[int]:
    """Returns by place of a tentative token the place whose seat it takes."""
    seat_of = [-1] * len(seats)
    for rank, place in enumerate(accepted):
        if place == rank or (not tight and seats[place][0] == seats[rank][0]):
            seat_of[place] = place
    free = sorted(set(range(len(seats))) - set(seat_of))
    for rank, place in enumerate(accepted):
        if seat_of[place] < 0:
            seat_of[place] = next(
                seat
                for seat in free
                if (seat == rank if tight else seats[seat][0] == seats[rank][0])
            )
            free.remove(seat_of[place])
    rest = iter(free)
    return [next(rest) if seat < 0 else seat for seat in seat_of]
