"""Decides where pages go when the pool grows: each sequence in one stretch, with room behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oval_core.pages import Page, SequencePages

_GROWTH = 1.125
"""Slots grow by an eighth, so that all copies together stay linear in the number of tokens."""


@dataclass(frozen=True, slots=True)
class Move:
    """Slots [src, src + size) go to [dst, dst + size)."""

    src: int
    dst: int
    size: int


@dataclass(frozen=True, slots=True)
class Relayout:
    """A new pool of `num_slots` and where the old slots go in it."""

    num_slots: int
    moves: tuple[Move, ...]
    base_of: Mapping[int, int]


def plan_relayout(
    sequences: Sequence[SequencePages], region_size: int, num_needed: int, reserve: int
) -> Relayout:
    """Lays every sequence out as one stretch at evenly spaced starts.

    Even spacing lets equal rows of a batch be read as one strided tensor. A shared page lies with the
    first sequence that holds it.

    Args:
        sequences: the batch.
        region_size: the largest region wanted; arenas are multiples of it.
        num_needed: slots that must be free afterwards, in regions of at most that size.
        reserve: slots wanted for each sequence in all.
    """
    rows = len(sequences)
    own: list[list[Page]] = []
    seen: set[int] = set()
    for seq in sequences:
        own.append([page for page in seq.pages if page.page_id not in seen])
        seen.update(page.page_id for page in seq.pages)
    used = [sum(page.capacity for page in pages) for pages in own]

    least = sum(used) + num_needed
    if any(page.capacity % region_size for pages in own for page in pages):
        least += rows * region_size  # an arena may then end in a rest shorter than a region
    wanted = rows * reserve if rows * reserve >= least else int(least * _GROWTH)
    arena = -(-wanted // (rows * region_size)) * region_size
    num_slots = rows * arena

    moves: list[Move] = []
    base_of: dict[int, int] = {}
    end, later = 0, sum(used)
    for row, pages in enumerate(own):
        # [ row 0 .. free | row 1 .. free | ... ]; a row longer than its arena pushes the next ones back
        end = max(end, min(row * arena, num_slots - later))
        later -= used[row]
        for page in pages:
            base_of[page.page_id] = end
            _add_move(moves, Move(page.base, end, page.capacity))
            end += page.capacity
    return Relayout(num_slots, tuple(moves), base_of)


def _add_move(moves: list[Move], move: Move) -> None:
    last = moves[-1] if moves else None
    if last and last.src + last.size == move.src and last.dst + last.size == move.dst:
        moves[-1] = Move(last.src, last.dst, last.size + move.size)
    else:
        moves.append(move)
