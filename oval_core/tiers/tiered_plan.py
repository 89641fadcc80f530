"""What a forward reads where: from the fast pool, and in batches of pages that are brought to it.

Shapes as in `values.py`. Tokens that are in slow tiers are older than the new ones, always: only sealed, committed pages
leave fast memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from oval_core.pages import Page, Run, SequencePages, end_in_order, extend_runs, key_tokens_of
from oval_core.plan import build_plan, row_plan
from oval_core.storage import ForwardRequest, page_sizes, page_starts
from oval_core.tiers.residency import Residency
from oval_core.tiers.transfer import Batch
from oval_core.values import RowPages, RowPagesChosen, RowPlan, StepPlan

Reader = tuple[int, RowPlan]
"""(row, which keys of a source it reads)."""


@dataclass(frozen=True, slots=True)
class Group:
    """Pages that are brought together, and what each row reads of them.

    Attributes:
        batch: the pages, for layer 0.
        readers: the rows.
        behind: tokens between the newest key and the first new token of the row where that is least; 0 where columns
            of padding lie between them.
    """

    batch: Batch
    readers: tuple[Reader, ...]
    behind: int

    def of_layer(self, layer: int) -> Batch:
        """Returns the batch for a tiered layer."""
        return replace(self.batch, layer=layer)

    def is_seen(self, window: int | None) -> bool:
        """Whether a layer with this window may see one of the keys."""
        return window is None or self.behind < window


@dataclass(frozen=True, slots=True)
class TieredPlan:
    """One forward over both: `fast` in the pool, then `groups` in turn."""

    fast: StepPlan
    groups: tuple[Group, ...]


@dataclass(slots=True)
class _Split:
    """Pages of one row by where they are; `away` is in the order of the sequence."""

    runs: list[Run]
    here: list[Page]
    away: list[Page]
    is_ordered: bool


@dataclass(frozen=True, slots=True)
class _Kept:
    seq: SequencePages
    stamp: tuple[int, int, int]
    split: _Split


class TieredPlanner:
    """Splits rows into what is in the pool and what is not; remembers the split while nothing moves."""

    def __init__(self, residency: Residency, batch_tokens: int) -> None:
        self._residency = residency
        self._batch_tokens = batch_tokens
        self._kept: dict[int, _Kept] = {}

    def plan(self, sequences: Sequence[SequencePages], forward: ForwardRequest) -> TieredPlan:
        """Plans a forward whose tokens have just been appended, for layers that read everything."""
        return self.plan_chosen(sequences, forward, [None] * len(sequences))

    def plan_chosen(
        self,
        sequences: Sequence[SequencePages],
        forward: ForwardRequest,
        chosen: Sequence[RowPagesChosen],
    ) -> TieredPlan:
        """Plans the same forward for layers that read only these pages of each row."""
        splits = [
            self._split(row, seq) if pages is None else self._walk(pages, seq.num_committed)
            for row, (seq, pages) in enumerate(zip(sequences, chosen, strict=True))
        ]
        rows = []
        for row, (seq, split) in enumerate(zip(sequences, splits, strict=True)):
            if chosen[row] is not None:
                tokens = forward.key_tokens(row, split.here, seq.num_committed)
            else:
                tokens = self._tokens(forward, row, split, seq.num_committed)
            is_watched = forward.selection.is_watched
            sizes = page_sizes(split.here) if is_watched else ()
            starts = page_starts(split.here, self._residency.shift) if is_watched else ()
            slots = self._new_slots(seq)
            rows.append(RowPages(split.runs, tokens, slots, seq.length, sizes, starts))
        fast = build_plan(rows, forward.requests, forward.num_queries, forward.device, forward.bias)
        return TieredPlan(fast, self._groups(sequences, splits, forward))

    def plan_past(
        self, seq: SequencePages, forward: ForwardRequest, row: int, pages: Sequence[Page]
    ) -> tuple[RowPlan | None, tuple[Group, ...]]:
        """Plans what one row reads besides, all older than its new tokens: in the pool, and in groups that are brought."""
        split = self._walk(pages, seq.num_committed)
        here = None
        if split.here:
            tokens = key_tokens_of(split.here) if forward.needs_tokens(row) else None
            sizes = page_sizes(split.here)
            starts = page_starts(split.here, self._residency.shift)
            where = RowPages(split.runs, tokens, (), seq.length, sizes, starts)
            here = row_plan(where, forward.requests[row], forward.device, is_past=True)
        away = {page.page_id for page in split.away}
        groups = []
        for members in _cut(split.away, self._batch_tokens):
            reader = self._reader(members, away, seq, forward, row)
            groups.append(Group(_batch(members), ((row, reader),), 0))
        return here, tuple(groups)

    @staticmethod
    def _tokens(
        forward: ForwardRequest, row: int, split: _Split, first_new: int
    ) -> list[int] | None:
        if forward.needs_tokens(row):
            is_enough = split.is_ordered and not split.away
        else:
            is_enough = forward.num_queries == 1 or end_in_order(split.here, first_new)
        return None if is_enough else key_tokens_of(split.here, first_new)

    def _split(self, row: int, seq: SequencePages) -> _Split:
        # Only the last page grows without an edit, so the pages before it are walked once.
        stamp = (self._residency.version, len(seq.pages), seq.num_edits)
        kept = self._kept.get(row)
        if kept is None or kept.seq is not seq or kept.stamp != stamp:
            before = self._walk(seq.pages[:-1], seq.num_committed)
            self._kept[row] = kept = _Kept(seq, stamp, before)
        before = kept.split
        split = _Split(list(before.runs), list(before.here), before.away, before.is_ordered)
        self._add(split, seq.pages[-1:], seq.num_committed)
        return split

    def _walk(self, pages: Sequence[Page], first_new: int) -> _Split:
        split = _Split([], [], [], True)
        self._add(split, pages, first_new)
        return split

    def _add(self, split: _Split, pages: Sequence[Page], first_new: int) -> None:
        for page in pages:
            if page.page_id not in self._residency:
                split.away.append(page)
                continue
            follows = not split.here or split.here[-1].tokens[-1] < page.tokens[0]
            split.is_ordered = split.is_ordered and follows and page.is_ordered()
            split.here.append(page)
            shift = self._residency.shift(page)
            for start, end in page.runs(first_new):
                extend_runs(split.runs, (start + shift, end + shift))

    def _new_slots(self, seq: SequencePages) -> list[int]:
        slots: dict[int, int] = {}
        for page in reversed(seq.pages):
            if page.kind == "text" and page.tokens[-1] < seq.num_committed:
                break
            if page.page_id in self._residency:
                shift = self._residency.shift(page)
                for slot, token in zip(page.slots, page.tokens, strict=True):
                    slots[token] = slot + shift
        return [slots[token] for token in range(seq.num_committed, seq.length)]

    def _groups(
        self, sequences: Sequence[SequencePages], splits: Sequence[_Split], forward: ForwardRequest
    ) -> tuple[Group, ...]:
        away = [{page.page_id for page in split.away} for split in splits]
        groups = []
        for members in self._members(splits):
            group = self._group(members, away, sequences, forward)
            if group.readers:
                groups.append(group)
        return tuple(groups)

    def batches(
        self, sequences: Sequence[SequencePages], chosen: Sequence[RowPagesChosen]
    ) -> list[Batch]:
        """Returns what a layer would have brought that reads these pages, for layer 0: the batches of such a plan."""
        splits = [
            self._walk(seq.pages if pages is None else pages, seq.num_committed)
            for seq, pages in zip(sequences, chosen, strict=True)
        ]
        return [_batch(members) for members in self._members(splits)]

    def _members(self, splits: Sequence[_Split]) -> list[list[Page]]:
        # Groups do not cross rows: a page that leaves then changes the last group of its row only. A page that
        # rows share comes once, with the first of them.
        seen: set[int] = set()
        groups: list[list[Page]] = []
        for split in splits:
            pages = [page for page in split.away if page.page_id not in seen]
            seen.update(page.page_id for page in pages)
            groups += _cut(pages, self._batch_tokens)
        return groups

    def _group(
        self,
        members: Sequence[Page],
        away: Sequence[set[int]],
        sequences: Sequence[SequencePages],
        forward: ForwardRequest,
    ) -> Group:
        ids = tuple(page.page_id for page in members)
        readers: list[Reader] = []
        behind = []
        for row, own in enumerate(away):
            request = forward.requests[row]
            if request.num_new == 0 or own.isdisjoint(ids):
                continue
            readers.append((row, self._reader(members, own, sequences[row], forward, row)))
            newest = max(max(page.tokens) for page in members if page.page_id in own)
            first = sequences[row].length - request.num_new
            behind.append(first - newest if request.positions is None else 0)
        return Group(_batch(members), tuple(readers), min(behind, default=0))

    def _reader(
        self,
        members: Sequence[Page],
        own: set[int],
        seq: SequencePages,
        forward: ForwardRequest,
        row: int,
    ) -> RowPlan:
        runs: list[Run] = []
        start = 0
        for page in members:
            if page.page_id in own:
                extend_runs(runs, (start, start + len(page)))
            start += len(page)
        mine = [page for page in members if page.page_id in own]
        tokens = key_tokens_of(mine) if forward.needs_tokens(row) else None
        sizes = page_sizes(mine) if forward.selection.is_watched else ()
        where = RowPages(runs, tokens, (), seq.length, sizes)
        return row_plan(where, forward.requests[row], forward.device, is_past=True)


def _cut(pages: Sequence[Page], max_tokens: int) -> list[list[Page]]:
    """Cuts pages into as few groups of at most `max_tokens` tokens as their order allows."""
    groups: list[list[Page]] = []
    count = max_tokens
    for page in pages:
        if count + len(page) > max_tokens:
            groups.append([])
            count = 0
        groups[-1].append(page)
        count += len(page)
    return groups


def _batch(members: Sequence[Page]) -> Batch:
    return Batch(0, tuple(page.page_id for page in members), tuple(len(page) for page in members))
