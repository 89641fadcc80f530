"""Pages of other sizes over the same slots: no token moves, no slot is lost, and everything else goes on as before."""

from __future__ import annotations

import pytest
from core.page_machine import shape_of
from core.repaged_table import RepagedTable, filled, partition
from core.test_page_table import PAGE_SIZES, PageTableMachine
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from oval_core.config import MAX_PAGE_SIZE


class RepagingMachine(PageTableMachine):
    """All operations of a table in any order, repaging and early seals among them."""

    checked: RepagedTable

    @initialize(page_size=PAGE_SIZES, rows=st.integers(1, 3))
    def start(self, page_size: int, rows: int) -> None:
        self.checked = RepagedTable(page_size, rows)

    @rule(data=st.data())
    def repage(self, data: st.DataObject) -> None:
        row = self.row(data)
        seq = self.checked.table.sequences[row]
        crossed = {t for p in seq.pages for t in range(min(p.tokens) + 1, max(p.tokens) + 1)}
        heads = [token for token in range(seq.length + 1) if token not in crossed]
        first, end = sorted((data.draw(st.sampled_from(heads)), data.draw(st.sampled_from(heads))))
        self.checked.repage(row, first, partition(data, end - first))

    @precondition(PageTableMachine.is_idle)
    @rule(data=st.data())
    def seal_tail(self, data: st.DataObject) -> None:
        self.checked.seal_tail(self.row(data))

    @invariant()
    def loses_no_slot(self) -> None:
        table = self.checked.table
        assert table.num_used + table.num_free == table.num_slots
        assert table.num_used == sum(page.capacity for page in table.pages())


RepagingMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, derandomize=True
)
TestRepaging = RepagingMachine.TestCase


@settings(max_examples=80, deadline=None, derandomize=True)
@given(PAGE_SIZES, st.integers(1, 200), st.integers(1, 3), st.data())
def test_a_prompt_gets_just_the_pages_that_are_wanted(
    page_size: int, count: int, rows: int, data: st.DataObject
) -> None:
    checked = filled(page_size, count, rows)
    wanted = [partition(data, count) for _ in range(rows)]
    room = -count % page_size
    for row, sizes in enumerate(wanted):
        checked.repage(row, 0, sizes)
        checked.check()
        pages = checked.table.sequences[row].pages
        assert [len(page) for page in pages] == sizes
        last = pages[-1]
        assert last.capacity == min(sizes[-1] + room, MAX_PAGE_SIZE)
        assert last.sealed == (last.capacity == sizes[-1])
    checked.append_all([40] * rows)
    checked.check()
    for row, sizes in enumerate(wanted):
        checked.commit(row, 40)
        grown = [len(page) for page in checked.table.sequences[row].pages]
        assert grown[: len(sizes) - 1] == sizes[:-1], "only the open page grows"


def test_pages_that_are_as_wanted_stay() -> None:
    checked = filled(8, 30)
    ids = [page.page_id for page in checked.table.sequences[0].pages]
    assert checked.repage(0, 0, [8, 8, 8, 6]) == []
    done = checked.repage(0, 0, [8, 3, 5, 8, 6])
    assert [([p.page_id for p in d.old], [len(p) for p in d.new]) for d in done] == [
        ([ids[1]], [3, 5])
    ]
    assert [page.page_id for page in checked.table.sequences[0].pages] == [1, 5, 6, 3, 4]


def test_parts_are_as_small_as_they_can_be() -> None:
    checked = filled(8, 48)
    done = checked.repage(0, 0, [4, 12, 16, 10, 6])
    assert [([len(p) for p in d.old], [len(p) for p in d.new]) for d in done] == [
        ([8, 8], [4, 12]),
        ([8, 8], [16]),
        ([8, 8], [10, 6]),
    ]


def test_only_the_tokens_asked_for_are_repaged() -> None:
    checked = filled(8, 40)
    checked.repage(0, 8, [5, 11])
    assert [len(page) for page in checked.table.sequences[0].pages] == [8, 5, 11, 8, 8]
    checked.check()


def test_a_page_ends_where_slots_are_not_consecutive() -> None:
    checked = filled(4, 4)
    checked.append(0, 8)
    checked.commit(0, [0, 3, 4, 5, 6])  # slots 4, 7, 8, 9, 10
    assert checked.table.sequences[0].token_slots() == [0, 1, 2, 3, 4, 7, 8, 9, 10]
    checked.repage(0, 0, [9])
    checked.check()
    pages = checked.table.sequences[0].pages
    assert [page.tokens for page in pages] == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
    assert [(page.base, page.capacity, page.sealed) for page in pages] == [
        (0, 5, True),
        (7, 5, False),
    ]
    assert checked.table.num_used == 10, "the hole is free"


def test_the_last_page_takes_no_room_behind_a_slot_that_is_taken() -> None:
    checked = RepagedTable(8, 1)
    checked.append(0, 4)
    checked.commit(0, [3])
    checked.append(0, 3)
    checked.commit(0, 3)
    assert checked.table.sequences[0].token_slots() == [3, 0, 1, 2]
    checked.repage(0, 0, [4])
    checked.check()
    pages = checked.table.sequences[0].pages
    assert [(p.base, p.capacity, p.sealed) for p in pages] == [(3, 1, True), (0, 3, True)]
    checked.append(0, 5)
    checked.check()


def test_images_shared_pages_and_tentative_tokens_stay_as_they_are() -> None:
    checked = filled(4, 8)
    checked.append_sets(0, [[0, 2], [1, 3]])
    checked.append(0, 8)
    checked.commit(0, 12)
    checked.fork(0)  # pages before 20 are shared
    checked.append(0, 6)
    checked.commit(0, 6)
    checked.append(0, 2)  # tentative, in the page of tokens 24, 25
    before = shape_of(checked.table)[0]
    done = checked.repage(0, 0, [20, 1, 7])
    assert [len(page) for part in done for page in part.new] == [1, 3]
    assert shape_of(checked.table)[0][:6] == before[:6]
    assert shape_of(checked.table)[0][-1] == before[-1]
    checked.check()


def test_what_is_sealed_stays_sealed() -> None:
    checked = filled(8, 3)
    checked.append_sets(0, [[0]])
    checked.commit(0, 1)
    checked.repage(0, 0, [3])
    first = checked.table.sequences[0].pages[0]
    assert (first.sealed, first.capacity) == (True, 3)
    checked.check()


@pytest.mark.parametrize(
    ("first", "sizes"), [(1, [7]), (0, [7]), (0, [33]), (0, [0, 8]), (0, [8, -1, 9])]
)
def test_sizes_that_do_not_fit_are_refused(first: int, sizes: list[int]) -> None:
    checked = filled(8, 40)
    with pytest.raises(AssertionError):
        checked.table.repage(0, first, sizes)
    checked.check()
    assert [len(page) for page in checked.table.sequences[0].pages] == [8] * 5


def test_a_sealed_tail_gives_its_room_to_the_next_page() -> None:
    checked = filled(16, 20)
    for count in (3, 1, 16):
        assert checked.seal_tail(0)
        assert not checked.seal_tail(0), "there is no open page"
        checked.append(0, count)
        checked.commit(0, count)
        checked.check()
    pages = checked.table.sequences[0].pages
    assert [(len(p), p.capacity) for p in pages] == [(16, 16), (4, 4), (3, 3), (1, 1), (16, 16)]
    assert checked.table.sequences[0].runs() == [(0, 40)], "pages follow each other without a gap"


def test_a_tail_with_holes_goes_on() -> None:
    checked = RepagedTable(8, 1)
    checked.append(0, 4)
    checked.commit(0, [0, 2])
    assert not checked.seal_tail(0)
    checked.append(0, 2)
    checked.commit(0, 2)
    assert checked.seal_tail(0)
    checked.check()


def test_a_tail_is_not_sealed_under_tentative_tokens() -> None:
    checked = filled(8, 3)
    checked.append(0, 2)
    with pytest.raises(AssertionError, match="between commits"):
        checked.table.seal_tail(0)


def test_a_page_sealed_early_that_loses_its_end_takes_tokens_up_to_its_new_capacity() -> None:
    checked = filled(16, 6)
    checked.seal_tail(0)
    checked.append(0, 5)
    checked.commit(0, 5)
    checked.truncate(0, 4)
    checked.append(0, 3)
    checked.commit(0, 3)
    checked.check()
    assert [len(page) for page in checked.table.sequences[0].pages] == [6, 1]


def test_a_fork_has_room_for_an_open_page_larger_than_the_others() -> None:
    checked = filled(4, 29)
    checked.repage(0, 0, [29])
    assert checked.table.sequences[0].tail is not None
    assert checked.table.sequences[0].tail.capacity == 32
    for _ in range(3):
        checked.fork(0)
        checked.check()
