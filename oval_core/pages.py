"""Owns what a page and a sequence of pages are: which slots hold which tokens. Plain integers, no K/V."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

Run = tuple[int, int]
"""Slots [start, end)."""

PageKind = Literal["text", "image"]

_NEVER = 1 << 62
"""A token that does not come."""


@dataclass(slots=True, eq=False)
class Page:
    """Up to 32 tokens of one sequence that are predicted, kept and moved together.

    A page owns the region of slots [base, base + capacity). Its tokens sit in `slots`, one each, in
    token order; the rest of the region is vacant. A sealed page takes no more tokens and may be shared
    by several sequences (`num_refs`); an open page belongs to one sequence.
    """

    page_id: int
    base: int
    capacity: int
    kind: PageKind = "text"
    slots: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    sealed: bool = False
    num_refs: int = 1
    version: int = 0
    """Grows with every change of content; a summary remembers the version it was made from."""

    def __len__(self) -> int:
        return len(self.slots)

    def vacant(self) -> list[int]:
        """Slots of the region that hold no token, ascending."""
        taken = set(self.slots)
        return [slot for slot in range(self.base, self.base + self.capacity) if slot not in taken]

    def runs(self, first_new: int = _NEVER) -> list[Run]:
        """The slots in use as runs, in key order; see `key_order`."""
        if self.tokens[-1] >= first_new and any(a > b for a, b in pairwise(self.slots)):
            return merge_runs([(slot, slot + 1) for slot, _ in self.key_order(first_new)])
        low, high = min(self.slots), max(self.slots)
        if high - low + 1 == len(self.slots):
            return [(low, high + 1)]
        return merge_runs([(slot, slot + 1) for slot in sorted(self.slots)])

    def key_order(self, first_new: int = _NEVER) -> list[tuple[int, int]]:
        """(slot, token) of each key in the order of reading: by slot, but tokens from `first_new` on last, by token.

        New tokens then are the last keys of a text, also where they took the places of rejected ones.
        """
        pairs = list(zip(self.slots, self.tokens, strict=True))
        num_old = bisect_left(self.tokens, first_new)
        return sorted(pairs[:num_old]) + pairs[num_old:]

    def is_ordered(self) -> bool:
        """Whether reading the slots upwards gives consecutive tokens."""
        count = len(self.slots)
        return all(self.slots[i] < self.slots[i + 1] for i in range(count - 1)) and (
            self.tokens == list(range(self.tokens[0], self.tokens[0] + count))
        )

    def keep(self, positions: Sequence[int]) -> None:
        """Keeps only the tokens at these places of the page, in this order."""
        self.slots = [self.slots[i] for i in positions]
        self.tokens = [self.tokens[i] for i in positions]
        self.version += 1

    def move(self, base: int) -> None:
        """Moves the region; the tokens keep their places in it."""
        delta = base - self.base
        self.base = base
        self.slots = [slot + delta for slot in self.slots]


class SequencePages:
    """The pages of one sequence. Together they hold each token [0, length) exactly once.

    Tokens [num_committed, length) are tentative: written, visible to the running forward, not yet counted.
    """

    def __init__(self) -> None:
        self.pages: list[Page] = []
        self.length = 0
        self.num_committed = 0
        self.num_edits = 0
        """Grows with every change but tokens added at the end."""
        self._runs: list[Run] | None = []
        self._ordered: bool | None = True
        self._is_mixed = False  # tentative tokens lie between others

    @property
    def num_tentative(self) -> int:
        """Tokens appended since the last commit."""
        return self.length - self.num_committed

    @property
    def tail(self) -> Page | None:
        """The open page that takes the next text token, if there is one."""
        last = self.pages[-1] if self.pages else None
        return None if last is None or last.sealed else last

    def runs(self) -> list[Run]:
        """Slots of all tokens, page after page in key order, tentative tokens new; adjacent runs merged."""
        if self._runs is None:
            self._runs = runs_of(self.pages, self.num_committed)
        return self._runs

    def key_tokens(self) -> list[int] | None:
        """Token index of each slot, in the order of `runs()`; None when that is 0, 1, 2, ..."""
        if self._ordered is None:
            self._ordered = self._is_ordered()
        if self._ordered:
            return None
        return key_tokens_of(self.pages, self.num_committed)

    def token_slots(self) -> list[int]:
        """Slot of each token, in token order."""
        slots = [0] * self.length
        for page in self.pages:
            for slot, token in zip(page.slots, page.tokens, strict=True):
                slots[token] = slot
        return slots

    def grew(self, slots: Sequence[int]) -> None:
        """Notes tokens just added upwards in the last pages, so that `runs()` need not walk every page."""
        if self._runs is not None:
            for slot in slots:
                extend_runs(self._runs, (slot, slot + 1))

    def changed(self) -> None:
        """Notes any other change of the pages."""
        self.num_edits += 1
        self._runs = None
        self._ordered = None
        self._is_mixed = self.num_tentative > 0

    def settle(self) -> None:
        """Lets all tokens count: none is new any more."""
        self.num_committed = self.length
        if self._is_mixed:
            self.changed()

    def _is_ordered(self) -> bool:
        expected = 0
        for page in self.pages:
            if page.tokens[0] != expected or not page.is_ordered():
                return False
            expected += len(page)
        return True


def extend_runs(runs: list[Run], run: Run) -> None:
    """Adds a run at the end of `runs`, merged with the last one where they touch."""
    if runs and runs[-1][1] == run[0]:
        runs[-1] = (runs[-1][0], run[1])
    else:
        runs.append(run)


def merge_runs(runs: Sequence[Run]) -> list[Run]:
    """Merges each run with the one before it where they touch; the order stays."""
    merged: list[Run] = []
    for run in runs:
        extend_runs(merged, run)
    return merged


def runs_of(pages: Sequence[Page], first_new: int = _NEVER) -> list[Run]:
    """Slots of some pages, page after page in key order (see `Page.key_order`), adjacent runs merged."""
    return merge_runs([run for page in pages for run in page.runs(first_new)])


def key_tokens_of(pages: Sequence[Page], first_new: int = _NEVER) -> list[int]:
    """Token index of each slot of some pages, page after page in key order (see `Page.key_order`)."""
    return [token for page in pages for _, token in page.key_order(first_new)]


def end_in_order(pages: Sequence[Page], first_new: int) -> bool:
    """Whether the last keys of some pages are the tokens from `first_new` on, in their order."""
    following = _NEVER
    is_old = False  # whether a page behind this one ends the new tokens
    for page in reversed(pages):
        if page.tokens[-1] < first_new:
            if page.kind == "text":
                break
            is_old = True
            continue
        if is_old or page.tokens[-1] >= following:
            return False
        following = page.tokens[bisect_left(page.tokens, first_new)]
        is_old = page.tokens[0] < first_new
    return True
