"""Owns the pages of a batch: append, commit, truncate, reorder. Plain integers; moves of K/V are returned, not made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oval_core.config import MAX_PAGE_SIZE
from oval_core.page_checks import check_pages
from oval_core.page_layout import Relayout, plan_relayout
from oval_core.pages import Page, PageKind, SequencePages
from oval_core.repaging import PageShape, PlaceOf, Repaged, at_home, plan_repaging
from oval_core.slot_allocator import SlotAllocator


@dataclass(frozen=True, slots=True)
class Appended:
    """Slots given to new tokens, in token order. They are tentative until `commit`."""

    slots: list[int]


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """K/V to copy from slots `src` to slots `dst`, pairwise: all are read before one is written."""

    src: list[int]
    dst: list[int]


class PageTable:
    """Pages of every sequence of a batch over one pool of slots.

    The order of calls is: `make_room` (may move everything), `append`, then `commit` or `truncate`.
    Pages partition the tokens of a sequence, always; sealed pages may be shared between sequences.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.sequences: list[SequencePages] = []
        self._allocator = SlotAllocator()
        self._next_page_id = 0
        self._released: list[int] = []
        self._is_even = True  # every region is a multiple of page_size, so free space is too
        self._is_mixed = False  # `make_room` set space aside for regions of other sizes

    @property
    def num_slots(self) -> int:
        """Slots of the pool."""
        return self._allocator.num_slots

    @property
    def num_free(self) -> int:
        """Slots that belong to no page."""
        return self._allocator.num_free

    @property
    def num_used(self) -> int:
        """Slots that belong to a page, vacant places of open pages included."""
        return self._allocator.num_used

    @property
    def num_opened(self) -> int:
        """Pages ever opened; their ids are 1, 2, ... in that order."""
        return self._next_page_id

    def pages(self) -> list[Page]:
        """Every page once, shared pages too."""
        return list({page.page_id: page for seq in self.sequences for page in seq.pages}.values())

    def open_sequences(self, count: int) -> None:
        """Starts `count` empty sequences; the table must be empty."""
        assert not self.sequences, "the table already has sequences"
        self.sequences = [SequencePages() for _ in range(count)]

    def text_regions(self, row: int, count: int) -> list[int]:
        """Sizes of the regions that `append(row, count)` will take."""
        return [self.page_size] * -(-max(count - self.room(row), 0) // self.page_size)

    def room(self, row: int) -> int:
        """Returns how many tokens the open page of a row takes."""
        tail = self.sequences[row].tail
        return len(tail.vacant()) if tail is not None else 0

    def copy_regions(self, count: int) -> list[int]:
        """Sizes of the regions that `count` forks take at most: one open page each."""
        tails = [seq.tail.capacity for seq in self.sequences if seq.tail is not None]
        return [max([self.page_size, *tails])] * count

    def cut_pages(self, row: int, length: int) -> list[Page]:
        """Pages of which `truncate(row, length)` keeps some tokens and drops others."""
        pages = self.sequences[row].pages
        return [page for page in pages if min(page.tokens) < length <= max(page.tokens)]

    def cut_regions(self, row: int, length: int) -> list[int]:
        """Sizes of the regions that `truncate(row, length)` takes: copies of the shared pages it cuts."""
        return [page.capacity for page in self.cut_pages(row, length) if page.num_refs > 1]

    def make_room(self, regions: Sequence[int], reserve: int = 0) -> Relayout | None:
        """Makes sure that regions of these sizes can be allocated.

        Args:
            regions: from `text_regions`, `copy_regions`, `cut_regions`, or the sizes of image pages.
            reserve: slots to set aside for each row, if the pool has to grow.
        Returns:
            The move that the caller must apply to K/V before anything is written, or None.
        """
        rows = len(self.sequences)
        # Rows start apart, also where regions of many sizes are to come: what that cuts off is set aside.
        self._is_mixed = any(size % self.page_size for size in regions)
        spare = rows * max(regions) if self._is_mixed else 0
        if self._allocator.fits(regions, spare):
            return None
        relayout = plan_relayout(self.sequences, max(regions), sum(regions) + spare, reserve)
        for page in self.pages():
            page.move(relayout.base_of[page.page_id])
        for seq in self.sequences:
            seq.changed()
        self._allocator = SlotAllocator(relayout.num_slots)
        for page in self.pages():
            assert self._allocator.allocate(page.capacity, near=page.base) == page.base
        return relayout

    def append(self, row: int, count: int, *, closes: bool = False) -> Appended:
        """Adds `count` text tokens to the open page and, as that fills, to new ones.

        Args:
            row: the sequence.
            count: tokens.
            closes: whether no text follows them: new pages then own no more slots than they need.
        """
        seq = self.sequences[row]
        slots: list[int] = []
        upwards = True
        while len(slots) < count:
            size = min(self.page_size, count - len(slots)) if closes else self.page_size
            page = seq.tail or self._open_page(row, size, "text")
            taken = page.vacant()[: count - len(slots)]
            upwards = upwards and (not page.slots or max(page.slots) < taken[0])
            first = seq.length + len(slots)
            page.slots += taken
            page.tokens += range(first, first + len(taken))
            page.version += 1
            page.sealed = len(page) == page.capacity
            slots += taken
        seq.length += count
        if upwards:
            seq.grew(slots)
        else:  # places freed by rejected tokens were taken again
            seq.changed()
        return Appended(slots)

    def append_sets(self, row: int, groups: Sequence[Sequence[int]]) -> Appended:
        """Adds the tokens of one image as sealed pages of any shape.

        Args:
            row: the sequence.
            groups: a partition of range(n): places, in token order, of each page's tokens; 1..32 a page.
        """
        count = sum(len(group) for group in groups)
        places = sorted(place for group in groups for place in group)
        assert places == list(range(count)), "groups do not partition the new tokens"
        assert all(1 <= len(group) <= MAX_PAGE_SIZE for group in groups), "page size out of 1..32"
        seq = self.sequences[row]
        if seq.tail is not None:
            seq.tail.sealed = True
        slots = [0] * count
        for group in groups:
            page = self._open_page(row, len(group), "image")
            page.tokens = [seq.length + place for place in sorted(group)]
            page.slots = list(range(page.base, page.base + page.capacity))
            page.sealed = True
            for place, slot in zip(sorted(group), page.slots, strict=True):
                slots[place] = slot
        seq.length += count
        seq.changed()
        return Appended(slots)

    def commit(self, row: int, accepted: int | Sequence[int]) -> None:
        """Makes tentative tokens count and frees the rest.

        Args:
            row: the sequence.
            accepted: how many of the tentative tokens, from the first; or, for a token tree, the places of the
                accepted ones, ascending. They become the next tokens, where they are: no K/V moves. `fold` first.
        """
        seq = self.sequences[row]
        if isinstance(accepted, int):
            assert 0 <= accepted <= seq.num_tentative, "more accepted than drafted"
            copies = self.truncate(row, seq.num_committed + accepted)
            assert not copies.src, "tentative tokens sit in pages of their own sequence only"
        else:
            self._keep_tentative(seq, accepted)
        seq.settle()

    def truncate(self, row: int, length: int) -> SlotCopy:
        """Drops the tokens [length, seq.length); returns the K/V to copy where a shared page was cut."""
        seq = self.sequences[row]
        assert 0 <= length <= seq.length, "cannot truncate to more than there is"
        copies = SlotCopy([], [])
        if length == seq.length:
            return copies
        for index in range(len(seq.pages) - 1, -1, -1):
            page = seq.pages[index]
            kept = [i for i, token in enumerate(page.tokens) if token < length]
            if not kept:
                self._release(seq.pages.pop(index))
            elif len(kept) < len(page):
                if page.num_refs > 1:
                    page = self._copy_page(seq, index, copies)
                page.keep(kept)
            elif page.kind == "text":
                break
        seq.length = length
        seq.num_committed = min(seq.num_committed, length)
        self._reopen(seq)
        seq.changed()
        return copies

    def repage(
        self, row: int, first_token: int, sizes: Sequence[int], place_of: PlaceOf = at_home
    ) -> list[Repaged]:
        """Puts tokens from `first_token` on into pages of these sizes; no K/V move, every token keeps its slot.

        A new page owns just the slots of its tokens; the last one of the sequence keeps the room of the open page
        that it replaces, up to 32 slots in all. See `plan_repaging` for the arguments, and for where pages are cut.

        Returns:
            What became what, in the order of the sequence. Ids of the old pages are released.
        """
        seq = self.sequences[row]
        done: list[Repaged] = []
        for part in reversed(plan_repaging(seq, first_token, sizes, place_of)):
            old = seq.pages[part.start : part.end]
            for page in old:
                self._release(page)
            new = [self._shaped_page(shape) for shape in part.shapes]
            seq.pages[part.start : part.end] = new
            done.append(Repaged(tuple(old), tuple(new)))
        if done:
            seq.changed()
        return done[::-1]

    def seal_tail(self, row: int) -> Page | None:
        """Seals the open page of a row before it is full, between commits; what is vacant in its region is free again.

        Returns:
            The page, whose `capacity` shrank; None where there is no open page, or one with holes between its tokens,
            which goes on.
        """
        seq = self.sequences[row]
        assert seq.num_tentative == 0, "seal between commits only"
        page = seq.tail
        if page is None or max(page.slots) != page.base + len(page) - 1:
            return None
        self._allocator.free(page.base + len(page), page.capacity - len(page))
        page.capacity = len(page)
        page.sealed = True
        self._is_even = False
        return page

    def reorder(self, rows: Sequence[int]) -> SlotCopy:
        """Replaces the batch by sequences[rows[0]], sequences[rows[1]], ...; rows may repeat (a fork).

        Sealed pages are shared; only the open page of a repeated row is copied.
        """
        old = self.sequences
        assert all(0 <= row < len(old) for row in rows), "no such row"
        assert all(seq.num_tentative == 0 for seq in old), "reorder between commits only"
        copies = SlotCopy([], [])
        self.sequences = []
        taken: set[int] = set()
        for row in rows:
            if row not in taken:
                self.sequences.append(old[row])
                taken.add(row)
            else:
                self.sequences.append(self._fork(old[row], copies))
        for row in set(range(len(old))) - taken:
            for page in old[row].pages:
                self._release(page)
        return copies

    def fork(self, row: int) -> SlotCopy:
        """Adds a sequence that starts as a copy of `row`."""
        return self.reorder([*range(len(self.sequences)), row])

    def take_released(self) -> list[int]:
        """Returns the ids of the pages that ended since the last call. An id is never used again."""
        released, self._released = self._released, []
        return released

    def reset(self) -> None:
        """Drops every sequence; the slots stay."""
        self._released += [page.page_id for page in self.pages()]
        self.sequences = []
        self._allocator = SlotAllocator(self.num_slots)
        self._is_even = True

    def forget_slots(self) -> None:
        """Makes an empty table own no slots, for a pool that was cleared."""
        assert not self.sequences, "reset first"
        self._allocator = SlotAllocator()

    def check_integrity(self) -> None:
        """Raises AssertionError if an invariant of the table does not hold."""
        self._allocator.check_integrity()
        check_pages(self.sequences)
        assert sum(page.capacity for page in self.pages()) == self.num_used
        assert self.num_used + self.num_free == self.num_slots

    def _open_page(self, row: int, capacity: int, kind: PageKind) -> Page:
        seq = self.sequences[row]
        last = seq.pages[-1] if seq.pages else None
        near = self._arena(row) if last is None else last.base + last.capacity
        page = self._new_page(capacity, kind, near)
        seq.pages.append(page)
        return page

    def _arena(self, row: int) -> int | None:
        # Where an empty row starts. In uneven free space a start in the middle could waste a region that
        # `make_room` counted on, so there the row starts where the longest free interval does, unless it has space for it.
        if not (self._is_even or self._is_mixed):
            return None
        return row * (self.num_slots // len(self.sequences) // self.page_size) * self.page_size

    def _new_page(self, capacity: int, kind: PageKind, near: int | None) -> Page:
        base = self._allocator.allocate(capacity, near)
        assert base is not None, "append without make_room"
        self._is_even = self._is_even and capacity % self.page_size == 0
        self._next_page_id += 1
        return Page(self._next_page_id, base, capacity, kind)

    def _shaped_page(self, shape: PageShape) -> Page:
        page = self._new_page(shape.capacity, "text", shape.base)
        assert page.base == shape.base, "the slots of the old pages are taken"
        shape.fill(page)
        return page

    def _copy_page(self, seq: SequencePages, index: int, copies: SlotCopy) -> Page:
        old = seq.pages[index]
        new = self._new_page(old.capacity, old.kind, old.base + old.capacity)
        new.slots = [slot - old.base + new.base for slot in old.slots]
        new.tokens = list(old.tokens)
        new.sealed = old.sealed
        copies.src.extend(old.slots)
        copies.dst.extend(new.slots)
        seq.pages[index] = new
        self._release(old)
        return new

    def _fork(self, seq: SequencePages, copies: SlotCopy) -> SequencePages:
        child = SequencePages()
        child.pages = list(seq.pages)
        child.length = child.num_committed = seq.length
        child.changed()
        for page in child.pages:
            page.num_refs += 1
        if seq.tail is not None:
            self._copy_page(child, len(child.pages) - 1, copies)
        return child

    def _keep_tentative(self, seq: SequencePages, accepted: Sequence[int]) -> None:
        assert list(accepted) == sorted(set(accepted)), "accepted places must ascend"
        if accepted:
            assert accepted[0] >= 0, "accepted place out of range"
            assert accepted[-1] < seq.num_tentative, "accepted place out of range"
        first = seq.num_committed
        new_index = {first + place: first + rank for rank, place in enumerate(accepted)}
        for index in range(len(seq.pages) - 1, -1, -1):
            page = seq.pages[index]
            if max(page.tokens) < first and page.kind == "text":
                break
            kept = [i for i, t in enumerate(page.tokens) if t < first or t in new_index]
            if not kept:
                self._release(seq.pages.pop(index))
            elif max(page.tokens) >= first:
                page.keep(kept)
                page.tokens = [new_index.get(token, token) for token in page.tokens]
        seq.length = first + len(accepted)
        self._reopen(seq)
        seq.changed()

    def _reopen(self, seq: SequencePages) -> None:
        # A text page that lost its end takes tokens again, as if the end had never come.
        if seq.pages:
            last = seq.pages[-1]
            if last.kind == "text" and last.num_refs == 1:
                last.sealed = len(last) == last.capacity

    def _release(self, page: Page) -> None:
        page.num_refs -= 1
        if page.num_refs == 0:
            self._allocator.free(page.base, page.capacity)
            self._released.append(page.page_id)
