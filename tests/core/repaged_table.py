"""A checked table that also repages and seals early, and sizes to do it with."""

from __future__ import annotations

from collections.abc import Sequence

from core.page_machine import CheckedTable
from hypothesis import strategies as st

from oval_core.config import MAX_PAGE_SIZE
from oval_core.repaging import Repaged


class RepagedTable(CheckedTable):
    """Also repages; checks what that may change and what not."""

    def truncate(self, row: int, length: int) -> None:
        self.make_room(self.table.cut_regions(row, length))
        kept = set(self.table.sequences[row].token_slots()[:length])
        used = kept.union(*(self.table.sequences[r].token_slots() for r in self.rows if r != row))
        copies = self.table.truncate(row, length)
        self._copy(copies.src, copies.dst, used)
        self.model.truncate(row, length)

    def repage(self, row: int, first_token: int, sizes: Sequence[int]) -> list[Repaged]:
        table, seq = self.table, self.table.sequences[row]
        before, old, used = seq.token_slots(), list(seq.pages), table.num_used
        edits = seq.num_edits
        shared = {page.page_id for page in table.pages() if page.num_refs > 1}
        table.take_released()
        done = table.repage(row, first_token, sizes)
        assert seq.token_slots() == before, "a token moved"
        assert (seq.num_edits > edits) == bool(done), "who remembers pages must hear of it"
        assert table.num_used <= used
        replaced = [page.page_id for part in done for page in part.old]
        assert table.take_released() == [p.page_id for part in done[::-1] for p in part.old]
        assert [p.page_id for p in old if p not in seq.pages] == replaced
        assert not shared & set(replaced)
        for part in done:
            tokens = [[t for page in side for t in page.tokens] for side in (part.old, part.new)]
            assert tokens[0] == tokens[1]
            assert all(page.kind == "text" for page in (*part.old, *part.new))
            assert all(len(p) == p.capacity for p in part.new if p.sealed), "a slot is lost"
        return done

    def seal_tail(self, row: int) -> bool:
        seq = self.table.sequences[row]
        before, used, tail = seq.token_slots(), self.table.num_used, seq.tail
        room = 0 if tail is None else tail.capacity - len(tail)
        page = self.table.seal_tail(row)
        assert page is None or (page is tail and page.sealed and len(page) == page.capacity)
        assert seq.token_slots() == before
        assert self.table.num_used == used - (room if page is not None else 0)
        return page is not None


def partition(draw: st.DrawFn | st.DataObject, count: int) -> list[int]:
    """Sizes 1..32 that sum to `count`."""
    pick = draw.draw if isinstance(draw, st.DataObject) else draw
    sizes: list[int] = []
    while sum(sizes) < count:
        sizes.append(min(pick(st.integers(1, MAX_PAGE_SIZE)), count - sum(sizes)))
    return sizes


def filled(page_size: int, count: int, rows: int = 1) -> RepagedTable:
    checked = RepagedTable(page_size, rows)
    checked.append_all([count] * rows)
    for row in range(rows):
        checked.commit(row, count)
    return checked
