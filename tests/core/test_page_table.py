"""Any sequence of operations keeps the page table whole and its content right."""

from __future__ import annotations

import pytest
from core.page_machine import CheckedTable, shape_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from oval_core.page_layout import plan_relayout
from oval_core.page_table import PageTable

PAGE_SIZES = st.sampled_from([1, 2, 3, 4, 5, 8, 16, 32])


@st.composite
def image_groups(draw: st.DrawFn) -> list[list[int]]:
    """A partition of range(n) into groups of 1..32, in any order: shuffled, or 4-wide tiles."""
    count = draw(st.integers(1, 48))
    places = draw(st.permutations(range(count)))
    groups, start = [], 0
    while start < count:
        size = draw(st.integers(1, min(32, count - start)))
        groups.append(list(places[start : start + size]))
        start += size
    return groups


class PageTableMachine(RuleBasedStateMachine):
    """All operations in any order."""

    @initialize(page_size=PAGE_SIZES, rows=st.integers(1, 3))
    def start(self, page_size: int, rows: int) -> None:
        self.checked = CheckedTable(page_size, rows)

    def row(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(self.checked.rows), label="row")

    def is_idle(self) -> bool:
        return all(self.checked.tentative(row) == 0 for row in self.checked.rows)

    @rule(data=st.data(), count=st.one_of(st.integers(1, 3), st.integers(0, 40)))
    def append(self, data: st.DataObject, count: int) -> None:
        self.checked.append(self.row(data), count)

    @rule(data=st.data(), reserve=st.sampled_from([0, 0, 50]))
    def append_to_all(self, data: st.DataObject, reserve: int) -> None:
        counts = data.draw(st.lists(st.integers(0, 20), min_size=len(self.checked.rows),
                                    max_size=len(self.checked.rows)))  # fmt: skip
        self.checked.append_all(counts, reserve)

    @rule(data=st.data(), groups=image_groups())
    def append_sets(self, data: st.DataObject, groups: list[list[int]]) -> None:
        self.checked.append_sets(self.row(data), groups)

    @rule(data=st.data())
    def commit_prefix(self, data: st.DataObject) -> None:
        row = self.row(data)
        self.checked.commit(row, data.draw(st.integers(0, self.checked.tentative(row))))

    @rule(data=st.data())
    def commit_subset(self, data: st.DataObject) -> None:
        row = self.row(data)
        places = st.sets(st.sampled_from(range(max(1, self.checked.tentative(row)))), max_size=8)
        accepted = sorted(data.draw(places)) if self.checked.tentative(row) else []
        self.checked.commit(row, accepted)

    @rule(data=st.data(), drafted=st.integers(1, 9))
    def draft_a_tree(self, data: st.DataObject, drafted: int) -> None:
        row = self.row(data)
        self.checked.commit(row, self.checked.tentative(row))
        self.checked.append(row, drafted)
        accepted = data.draw(st.sets(st.integers(0, drafted - 1), min_size=1, max_size=4))
        self.checked.commit(row, sorted(accepted))

    @rule()
    def commit_everything(self) -> None:
        for row in self.checked.rows:
            self.checked.commit(row, self.checked.tentative(row))

    @rule(data=st.data(), drafted=st.integers(1, 40))
    def draft(self, data: st.DataObject, drafted: int) -> None:
        row = self.row(data)
        if self.checked.tentative(row) == 0:
            self.checked.draft(row, drafted, data.draw(st.integers(0, drafted)))

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        row = self.row(data)
        self.checked.truncate(row, data.draw(st.integers(0, len(self.checked.model.tokens[row]))))

    @precondition(is_idle)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        rows = st.lists(st.sampled_from(self.checked.rows), min_size=1, max_size=4)
        self.checked.reorder(data.draw(rows))

    @precondition(lambda self: self.is_idle() and len(self.checked.rows) < 5)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.checked.fork(self.row(data))

    @rule(rows=st.integers(1, 3))
    def reset(self, rows: int) -> None:
        self.checked.reset(rows)

    @invariant()
    def holds(self) -> None:
        self.checked.check()


PageTableMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, derandomize=True
)
TestPageTable = PageTableMachine.TestCase


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    PAGE_SIZES, st.lists(st.tuples(st.integers(1, 40), st.floats(0, 1)), min_size=1, max_size=12)
)
def test_append_and_reject_equals_append_of_the_accepted(
    page_size: int, steps: list[tuple[int, float]]
) -> None:
    drafted, plain = CheckedTable(page_size, 1), CheckedTable(page_size, 1)
    for count, share in steps:
        accepted = round(count * share)
        drafted.append(0, count)
        drafted.commit(0, accepted)
        plain.append(0, accepted)
        plain.commit(0, accepted)
        assert shape_of(drafted.table) == shape_of(plain.table)
        drafted.check()
    length = plain.table.sequences[0].length
    sizes = [len(page) for page in plain.table.sequences[0].pages]
    assert sizes == [min(page_size, length - i) for i in range(0, length, page_size)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(PAGE_SIZES, st.integers(0, 20), st.integers(1, 30), st.data())
def test_a_subset_that_is_a_prefix_equals_the_prefix(
    page_size: int, before: int, drafted: int, data: st.DataObject
) -> None:
    accepted = data.draw(st.integers(0, drafted))
    shapes = []
    for how in (accepted, list(range(accepted))):
        checked = CheckedTable(page_size, 1)
        checked.append(0, before)
        checked.commit(0, before)
        checked.append(0, drafted)
        checked.commit(0, how)
        checked.check()
        shapes.append((shape_of(checked.table), checked.table.sequences[0].token_slots()))
    assert shapes[0] == shapes[1]


def test_places_freed_by_a_tree_are_taken_again_and_read_in_the_right_order() -> None:
    checked = CheckedTable(4, 1)
    checked.append(0, 4)
    checked.commit(0, [3])  # slot 3 holds token 0
    for count in (1, 1, 1, 3):  # slots 0, 1, 2, then a page of its own
        checked.check()
        checked.append(0, count)
        checked.commit(0, count)
    checked.check()
    assert [len(page) for page in checked.table.sequences[0].pages] == [4, 3]
    assert checked.table.sequences[0].token_slots()[:4] == [3, 0, 1, 2]
    assert checked.table.sequences[0].key_tokens() == [1, 2, 3, 0, 4, 5, 6]


def test_a_reset_pool_serves_another_batch_size() -> None:
    """What `fits` promised must hold though rows of the new batch start between old page borders."""
    uneven = 0
    for rows in range(2, 8):
        checked = CheckedTable(16, 1)
        checked.append(0, 100)
        checked.commit(0, 100)
        slots = checked.table.num_slots
        uneven += (slots // rows) % 16 > 0
        checked.reset(rows)
        pages_left = slots // 16 - (rows - 1)
        checked.append_all([1] * (rows - 1) + [16 * pages_left])
        checked.check()
        assert checked.table.num_slots == slots
    assert uneven, "every start is a page border: nothing tested"


def test_freed_pages_are_reused() -> None:
    checked = CheckedTable(16, 1)
    checked.append_all([100], reserve=128)
    checked.commit(0, 100)
    first = checked.table.sequences[0].token_slots()
    slots = checked.table.num_slots
    for length in (0, 50, 3, 99):
        checked.truncate(0, length)
        checked.append(0, 100 - length)
        checked.commit(0, 100 - length)
        checked.check()
        assert checked.table.sequences[0].token_slots() == first
    assert checked.table.num_slots == slots


def test_a_shared_page_is_copied_before_it_is_cut() -> None:
    checked = CheckedTable(4, 1)
    checked.append(0, 10)
    checked.commit(0, 10)
    checked.fork(0)
    first, second = checked.table.sequences
    assert [a is b for a, b in zip(first.pages, second.pages, strict=True)] == [True, True, False]
    versions = [page.version for page in first.pages]
    checked.truncate(1, 6)
    checked.append(1, 7)
    checked.commit(1, 7)
    checked.check()
    assert [page.version for page in first.pages] == versions, "the other row's page was changed"
    assert [a is b for a, b in zip(first.pages, second.pages, strict=False)] == [True, False, False]


def test_a_tree_commit_leaves_shared_image_pages_untouched() -> None:
    checked = CheckedTable(4, 1)
    checked.append_sets(0, [[0, 2], [1, 3]])
    checked.commit(0, 4)
    checked.fork(0)
    versions = [page.version for page in checked.table.sequences[1].pages]
    checked.append(0, 3)
    checked.commit(0, [1])
    checked.check()
    assert [page.version for page in checked.table.sequences[1].pages] == versions


def test_a_text_page_sealed_by_an_image_opens_again_when_the_image_is_dropped() -> None:
    checked = CheckedTable(8, 1)
    checked.append(0, 3)
    checked.commit(0, 3)
    for how in ("reject", "truncate"):
        checked.append_sets(0, [[0, 3], [1, 2]])
        if how == "reject":
            checked.commit(0, 0)
        else:
            checked.commit(0, 4)
            checked.truncate(0, 3)
        assert shape_of(checked.table) == [[("text", False, 8, [0, 1, 2])]]
    checked.append(0, 4)
    checked.check()
    assert len(checked.table.sequences[0].pages) == 1


def test_even_rows_lie_at_even_distances() -> None:
    checked = CheckedTable(16, 3)
    checked.append_all([100, 100, 100], reserve=160)
    starts = [seq.runs() for seq in checked.table.sequences]
    assert starts == [[(0, 100)], [(160, 260)], [(320, 420)]]
    assert checked.table.num_slots == 480


def test_rows_that_outgrow_the_pool_are_laid_out_evenly_again() -> None:
    checked = CheckedTable(16, 3)
    for _ in range(40):
        checked.append_all([10, 10, 10])
        checked.check()
        for row in checked.rows:
            checked.commit(row, 10)
    checked.make_room([16] * (1 + checked.table.num_free // 16))
    (a,), (b,), (c,) = (seq.runs() for seq in checked.table.sequences)
    assert a[1] - a[0] == b[1] - b[0] == c[1] - c[0] == 400
    assert b[0] - a[0] == c[0] - b[0] > 400


def test_a_shared_page_is_never_opened_again() -> None:
    checked = CheckedTable(8, 1)
    checked.append(0, 3)
    checked.append_sets(0, [[0, 1]])
    checked.commit(0, 5)
    checked.fork(0)
    checked.truncate(0, 3)  # its last page holds 3 of 8 and belongs to the other row as well
    checked.check()
    checked.append(0, 2)
    checked.check()
    assert [len(page) for page in checked.table.sequences[0].pages] == [3, 2]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=5),
    st.integers(1, 80),
    st.integers(0, 120),
)
def test_a_relayout_moves_every_page_once_and_leaves_the_room_asked_for(
    lengths: list[int], needed: int, reserve: int
) -> None:
    checked = CheckedTable(8, len(lengths))
    checked.append_all(lengths)
    sequences = checked.table.sequences
    used = sum(page.capacity for seq in sequences for page in seq.pages)
    relayout = plan_relayout(sequences, 8, needed, reserve)
    assert sum(move.size for move in relayout.moves) == used
    assert relayout.num_slots - used >= needed
    assert relayout.num_slots >= reserve * len(lengths)
    targets = [t for move in relayout.moves for t in range(move.dst, move.dst + move.size)]
    assert len(targets) == len(set(targets))
    assert not targets or max(targets) < relayout.num_slots


@pytest.mark.parametrize(
    "groups", [[[0, 1], [1, 2]], [[0, 2]], [list(range(33))], [[0], []], [[1, 2]]]
)
def test_groups_that_are_no_partition_are_refused(groups: list[list[int]]) -> None:
    table = PageTable(16)
    table.open_sequences(1)
    table.make_room([32, 32])
    with pytest.raises(AssertionError):
        table.append_sets(0, groups)
    assert table.sequences[0].length == 0


@pytest.mark.parametrize("accepted", [5, -1, [3, 1], [1, 1], [4], [-1]])
def test_places_that_were_not_drafted_are_refused(accepted: int | list[int]) -> None:
    checked = CheckedTable(4, 1)
    checked.append(0, 2)
    checked.commit(0, 2)
    checked.append(0, 4)
    with pytest.raises(AssertionError):
        checked.table.commit(0, accepted)
    checked.check()


def test_reorder_with_tentative_tokens_is_refused() -> None:
    checked = CheckedTable(4, 2)
    checked.append_all([3, 3])
    with pytest.raises(AssertionError, match="between commits"):
        checked.table.reorder([1, 0])


@pytest.mark.parametrize("rows", [[2], [0, 2], [-1]])
def test_reorder_with_a_row_that_is_not_there_leaves_the_table_whole(rows: list[int]) -> None:
    checked = CheckedTable(4, 2)
    checked.append_all([6, 3])
    checked.commit(0, 6)
    checked.commit(1, 3)
    with pytest.raises((AssertionError, IndexError)):
        checked.table.reorder(rows)
    checked.check()
