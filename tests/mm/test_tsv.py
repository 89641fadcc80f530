"""Tables: what is written is read, Python's csv module agrees, and a bad line costs only itself."""

import csv
import io

from hypothesis import given, settings
from hypothesis import strategies as st
from reference_mm import table_slowly

from oval_mm import tsv
from oval_mm.tsv import BadRow, Record, records

CELLS = st.text(alphabet='a"\t\né€🙂 ,', max_size=6)


def read(text: str) -> list[Record | BadRow]:
    return list(records(io.BytesIO(text.encode())))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(CELLS, min_size=2, max_size=4), max_size=5), st.sampled_from(["\n", "\r\n"]))  # fmt: skip
def test_what_was_written_is_read(rows: list[list[str]], end: str) -> None:
    file = io.StringIO(newline="")
    csv.writer(file, delimiter="\t", lineterminator=end).writerows(rows)
    text = file.getvalue()
    found = read(text)
    assert [list(row.fields) for row in found if isinstance(row, Record)] == rows
    lines = [row.line for row in found]
    assert lines == sorted(set(lines))


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet='a"\t\n', max_size=16))
def test_any_text_is_read_as_by_csv(text: str) -> None:
    found = read(text)
    if all(isinstance(row, Record) for row in found):
        want = [row for row in table_slowly(text) if row != [""]]
        assert [list(row.fields) for row in found if isinstance(row, Record)] == want


def test_lines_are_counted_through_fields_of_several_lines() -> None:
    found = read('\ufeffa\tb\n\n1\t"x\ny\n"\r\n2\tz')
    assert found == [
        Record(line=1, fields=("a", "b")),
        Record(line=3, fields=("1", "x\ny\n")),
        Record(line=6, fields=("2", "z")),
    ]


def test_a_quote_that_never_closes_costs_its_line_only() -> None:
    found = read('a\tb\n1\t"open\n2\tz\n3\ty\n')
    assert found[1] == BadRow(line=2, index="", reason="a quote is opened and never closed")
    assert [row.fields for row in found if isinstance(row, Record)] == [("a", "b"), ("2", "z"), ("3", "y")]  # fmt: skip
    assert [row.line for row in found] == [1, 2, 3, 4]


def test_a_field_may_not_go_on_for_ever(monkeypatch) -> None:
    monkeypatch.setattr(tsv, "MAX_RECORD_LINES", 3)
    found = read('1\t"a\nb\nc"\n2\t"a\nb\nc\nd"\n')
    assert isinstance(found[0], Record)
    assert isinstance(found[1], BadRow)
    assert found[1].line == 4


def test_bytes_that_are_no_text_cost_their_line_only() -> None:
    found = list(records([b"a\tb\n", b"\xff\xfe\tx\n", b'1\t"\xff\n', b"2\ty\n"]))
    assert [(row.line, isinstance(row, BadRow)) for row in found] == [(1, False), (2, True), (3, True), (4, False)]  # fmt: skip
    assert isinstance(found[1], BadRow)
    assert "not UTF-8" in found[1].reason
