"""MMBench's table: what its fields mean, which rows are refused with which reason, and rolling."""

import base64
import csv
from pathlib import Path
from typing import Any

import pytest

from oval_core.errors import ConfigError
from oval_mm.mmbench import MMBenchFile, Question, read_mmbench, roll

COLUMNS = ["index", "question", "hint", "A", "B", "C", "D", "answer", "category", "image", "source", "l2-category", "comment", "split"]  # fmt: skip
IMAGE = base64.b64encode(b"one" * 40).decode()
OTHER = base64.b64encode(b"two" * 40).decode()
GOOD: dict[str, Any] = {"index": 7, "question": "What?", "A": "cat", "B": "dog", "answer": "B", "image": IMAGE}  # fmt: skip


def write(path: Path, *rows: dict[str, Any], columns: list[str] | None = None) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns or COLUMNS, delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def read(tmp_path: Path, *rows: dict[str, Any], strict: bool = False) -> MMBenchFile:
    return read_mmbench(write(tmp_path / "a.tsv", *rows), strict=strict)


def test_a_whole_row(tmp_path: Path) -> None:
    row = {**GOOD, "hint": "Look.", "C": "a\nb", "category": "ocr", "l2-category": "cp", "split": "dev"}  # fmt: skip
    file = read(tmp_path, row)
    (question,) = file.questions
    assert question == Question(
        line=2,
        index=7,
        group=7,
        question="What?",
        hint="Look.",
        options={"A": "cat", "B": "dog", "C": "a\nb"},
        answer="B",
        category="ocr",
        l2_category="cp",
        split="dev",
        pictures=question.pictures,
    )
    assert (len(question.pictures), file.is_rolled, file.bad_rows) == (1, False, [])


def test_rolled_rows_refer_to_images(tmp_path: Path) -> None:
    file = read(
        tmp_path,
        {**GOOD, "index": 1_000_007, "image": 7},  # before the row that has the image
        GOOD,
        {**GOOD, "index": 8, "image": OTHER},
        {**GOOD, "index": 9, "image": f"['{IMAGE}', '{OTHER}']"},
    )
    first, second, third, fourth = file.questions
    assert (first.group, first.is_base, second.is_base, file.is_rolled) == (7, False, True, True)
    assert first.pictures == second.pictures != third.pictures
    assert fourth.pictures == (*second.pictures, *third.pictures)
    assert len(file.pictures) == 2


def test_groups_of_their_own(tmp_path: Path) -> None:
    rows = [{**GOOD, "g_index": 7}, {**GOOD, "index": 5_000_000, "g_index": 7}]
    path = write(tmp_path / "a.tsv", *rows, columns=[*COLUMNS, "g_index"])
    assert [(q.group, q.is_base) for q in read_mmbench(path).questions] == [(7, True), (7, False)]


@pytest.mark.parametrize("text", ["", "NA", "nan", "None", "null", "N/A"])
def test_texts_that_pandas_takes_for_nothing(tmp_path: Path, text: str) -> None:
    row = {**GOOD, "C": text, "hint": text}
    (question,) = read(tmp_path, row).questions
    assert (list(question.options), question.hint) == (["A", "B"], None)
    (strictly,) = read(tmp_path, row, strict=True).questions
    assert strictly.options.get("C", "") == text
    assert (strictly.hint or "") == text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"index": "../../etc/x"},
            "index '../../etc/x' is no whole number from 0 up to 999999999999999",
        ),
        ({"index": "-1"}, "index '-1' is no whole number from 0 up to 999999999999999"),
        ({"index": "1.5"}, "index '1.5' is no whole number from 0 up to 999999999999999"),
        ({"index": "7.0"}, "index 7 is on line 2 already"),
        ({"index": 8, "question": ""}, "no question"),
        ({"index": 8, "A": "", "B": ""}, "no option"),
        ({"index": 8, "answer": "C"}, "answer 'C' is none of the options A, B"),
        ({"index": 8, "answer": "b"}, "answer 'b' is none of the options A, B"),
        ({"index": 8, "image": ""}, "no image"),
        ({"index": 8, "image": "99"}, "image refers to row 99, which is no row with an image"),
        ({"index": 8, "image": "9"}, "image refers to row 9, which refers to another row"),
        (
            {"index": 8, "image": "../x.png"},
            "image '../x.png' is no whole number from 0 up to 999999999999999",
        ),
        ({"index": 8, "image": "[" + "x" * 80 + "]"}, "image is a list that cannot be read"),
        ({"index": 8, "image": str([1] * 40)}, "image is a list, but not of images"),
    ],
)
def test_bad_rows_are_named_and_reading_goes_on(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    rows = (GOOD, {**GOOD, **change}, {**GOOD, "index": 9, "image": 7})
    file = read(tmp_path, *rows)
    assert [question.index for question in file.questions] == [7, 9]
    assert [(row.line, row.index, row.reason) for row in file.bad_rows] == [
        (3, str({**GOOD, **change}["index"]), reason)
    ]
    with pytest.raises(ConfigError, match="has 1 bad rows, the first line 3: "):
        read(tmp_path, *rows, strict=True)


def test_too_many_fields(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", GOOD)
    with path.open("a") as file:
        file.write("8\t" * 20 + "\n")
    (bad,) = read_mmbench(path).bad_rows
    assert (bad.line, bad.reason) == (3, "21 fields, and 14 columns")


def test_rows_without_an_answer_can_be_asked(tmp_path: Path) -> None:
    (question,) = read(tmp_path, {**GOOD, "answer": ""}).questions
    assert question.answer is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "lacks the columns index, question, image, A"),
        ("index\tquestion\timage\n", "lacks the columns A"),
        ("index\tquestion\timage\tA\n", "has no row"),
        ("index\tquestion\timage\tA\nx\ty\tz\tv\n", "has 1 bad rows, the first line 2"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_mmbench(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_mmbench(tmp_path / "none.tsv")


def test_rolling_moves_each_text_to_the_next_letter(tmp_path: Path) -> None:
    (question,) = read(tmp_path, {**GOOD, "C": "bird"}).questions
    rolled = list(roll([question]))
    assert [q.index for q in rolled] == [7, 1_000_007, 2_000_007]
    assert rolled[0] == question
    assert [list(q.options.values()) for q in rolled] == [
        ["cat", "dog", "bird"],
        ["bird", "cat", "dog"],
        ["dog", "bird", "cat"],
    ]
    assert [q.options[q.answer or ""] for q in rolled] == ["dog"] * 3
    assert {q.group for q in rolled} == {7}
