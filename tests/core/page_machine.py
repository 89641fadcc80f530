"""A page table beside `ReferencePages` and a fake memory of one integer a slot. Checks everything after each step."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from reference import ReferencePages

from oval_core.config import MAX_PAGE_SIZE
from oval_core.page_table import PageTable

UNWRITTEN = -1


def shape_of(table: PageTable) -> list[list[tuple[str, bool, int, list[int]]]]:
    """Kind, seal, capacity and tokens of every page of every row."""
    return [
        [(page.kind, page.sealed, page.capacity, list(page.tokens)) for page in seq.pages]
        for seq in table.sequences
    ]


class CheckedTable:
    """Does to the table what `PagedCache` does, and to the model the same; moves the memory as asked."""

    def __init__(self, page_size: int, rows: int) -> None:
        self.table = PageTable(page_size)
        self.table.open_sequences(rows)
        self.model = ReferencePages(rows)
        self.memory: list[int] = []
        self.image_of: dict[int, int] = {}  # token id -> image; text tokens are not in it
        self.next_id = 0
        self.num_images = 0

    @property
    def rows(self) -> range:
        return range(len(self.table.sequences))

    def tentative(self, row: int) -> int:
        return len(self.model.tokens[row]) - self.model.committed[row]

    def make_room(self, regions: Sequence[int], reserve: int = 0) -> None:
        relayout = self.table.make_room(regions, reserve)
        if relayout is None:
            return
        old, self.memory = self.memory, [UNWRITTEN] * relayout.num_slots
        for move in relayout.moves:
            self.memory[move.dst : move.dst + move.size] = old[move.src : move.src + move.size]
        assert len(self.memory) == self.table.num_slots == relayout.num_slots

    def append_all(self, counts: Sequence[int], reserve: int = 0) -> None:
        """One forward of a ragged batch: room for all rows first."""
        self.make_room(
            [r for row, n in enumerate(counts) for r in self.table.text_regions(row, n)], reserve
        )
        for row, count in enumerate(counts):
            used = self._used_slots()
            ids = self._new_ids(count)
            self._write(self.table.append(row, count).slots, ids, used)
            self.model.append(row, ids)

    def append(self, row: int, count: int) -> None:
        self.append_all([count if row == r else 0 for r in self.rows])

    def append_sets(self, row: int, groups: Sequence[Sequence[int]]) -> None:
        self.make_room([len(group) for group in groups])
        ids = self._new_ids(sum(map(len, groups)))
        self.num_images += 1
        self.image_of.update(dict.fromkeys(ids, self.num_images))
        used = self._used_slots()
        self._write(self.table.append_sets(row, groups).slots, ids, used)
        self.model.append_sets(row, ids)

    def commit(self, row: int, accepted: int | Sequence[int]) -> None:
        self.table.commit(row, accepted)
        self.model.commit(row, accepted)

    def draft(self, row: int, drafted: int, accepted: int) -> None:
        """Appends `drafted`, commits `accepted`: pages must be as if only those had been appended."""
        alone = copy.deepcopy(self)
        alone.append(row, accepted)
        alone.commit(row, accepted)
        self.append(row, drafted)
        self.commit(row, accepted)
        assert shape_of(self.table) == shape_of(alone.table), "rejected tokens left a trace"
        assert self.table.num_used == alone.table.num_used

    def truncate(self, row: int, length: int) -> None:
        pages = self.table.sequences[row].pages
        shared = [page for page in pages if page.num_refs > 1]
        images = [page for page in shared if page.kind == "image"]
        self.make_room(self.table.copy_regions(len(images) + 1) if shared else [])
        kept = set(self.table.sequences[row].token_slots()[:length])
        used = kept.union(*(self.table.sequences[r].token_slots() for r in self.rows if r != row))
        copies = self.table.truncate(row, length)
        self._copy(copies.src, copies.dst, used)
        self.model.truncate(row, length)

    def reorder(self, rows: Sequence[int]) -> None:
        self.make_room(self.table.copy_regions(len(rows) - len(set(rows))))
        used = self._used_slots()
        copies = self.table.reorder(rows)
        self._copy(copies.src, copies.dst, used)
        self.model.reorder(rows)

    def fork(self, row: int) -> None:
        self.make_room(self.table.copy_regions(1))
        used = self._used_slots()
        copies = self.table.fork(row)
        self._copy(copies.src, copies.dst, used)
        self.model.fork(row)

    def reset(self, rows: int) -> None:
        slots = self.table.num_slots
        self.table.reset()
        assert self.table.num_free == self.table.num_slots == slots, "slots lost by reset"
        self.table.open_sequences(rows)
        self.model.reset(rows)

    def check(self) -> None:
        """Every invariant, and the content of every row, three ways."""
        self.table.check_integrity()
        assert len(self.table.sequences) == len(self.model.tokens)
        for row, seq in enumerate(self.table.sequences):
            tokens = self.model.tokens[row]
            assert seq.length == len(tokens)
            assert seq.num_committed == self.model.committed[row]
            assert [self.memory[slot] for slot in seq.token_slots()] == tokens
            order = seq.key_tokens()
            read = [self.memory[slot] for start, end in seq.runs() for slot in range(start, end)]
            assert read == (tokens if order is None else [tokens[token] for token in order])
            for page in seq.pages:
                assert 1 <= len(page) <= page.capacity <= MAX_PAGE_SIZE
                images = {self.image_of.get(tokens[token]) for token in page.tokens}
                assert len(images) == 1, "a page mixes text and image, or two images"
                assert (page.kind == "text") == (images == {None})
            if seq.tail is not None:
                assert seq.tail.kind == "text"
                assert len(seq.tail) < seq.tail.capacity

    def _new_ids(self, count: int) -> list[int]:
        self.next_id += count
        return list(range(self.next_id - count, self.next_id))

    def _used_slots(self) -> set[int]:
        return {slot for seq in self.table.sequences for slot in seq.token_slots()}

    def _write(self, slots: Sequence[int], ids: Sequence[int], used: set[int]) -> None:
        assert len(slots) == len(set(slots)) == len(ids)
        assert not used & set(slots), "a slot that holds a token was given away"
        for slot, token in zip(slots, ids, strict=True):
            self.memory[slot] = token

    def _copy(self, src: Sequence[int], dst: Sequence[int], used: set[int]) -> None:
        assert not set(src) & set(dst)
        assert set(src) <= used
        assert not used & set(dst), "a copy overwrites a token"
        assert len(dst) == len(set(dst))
        for a, b in zip(src, dst, strict=True):
            self.memory[b] = self.memory[a]
