"""Files of short-answer questions: the forms in use, refused rows, and images that may not lead out of their folder."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from oval_core.errors import ConfigError
from oval_mm.vqa_files import read_vqa

TEN = ["cat"] * 10
INLINE = base64.b64encode(b"image" * 60).decode()
GOOD: dict[str, Any] = {"question_id": 1, "question": "What?", "answers": TEN, "image": "a.jpg"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    for name in ("a.jpg", "COCO_val2014_000000000042.jpg", "77.jpg", "t1.jpg"):
        (tmp_path / "images" / name).write_bytes(b"x")
    (tmp_path / "secret.jpg").write_bytes(b"x")
    return tmp_path


def rows(folder: Path, *given: Any, strict: bool = False) -> Any:
    path = folder / "q.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in given))  # fmt: skip
    return read_vqa(path, images=folder / "images", strict=strict)


def test_rows_of_json(folder: Path) -> None:
    file = rows(
        folder,
        GOOD,
        {"id": "b/../c", "text": "Who?", "answer": "dog", "image": INLINE, "category": "k"},
        "",
        {"index": 3, "question": "How many?", "answers": [{"answer": "2"}, {"answer": "3"}], "image": "data:image/png;base64,xx"},
        {"question": "And?", "image_id": 77},
    )  # fmt: skip
    found = [(q.line, q.name, q.answers, q.kind) for q in file.questions]
    assert found == [
        (1, "1", tuple(TEN), ""),
        (2, "b/../c", ("dog",), "k"),
        (4, "3", ("2", "3"), ""),
        (5, "5", (), ""),
    ]
    pictures = [q.picture for q in file.questions]
    assert pictures[0] == (folder / "images" / "a.jpg").resolve()
    assert [isinstance(p, str) for p in pictures] == [False, True, True, False]
    assert file.bad_rows == []


def test_the_two_files_of_vqav2(folder: Path) -> None:
    questions = {"data_subtype": "val2014", "questions": [{"image_id": 42, "question": "What?", "question_id": 42000}, {"image_id": 42, "question": "Not?", "question_id": 5}]}  # fmt: skip
    answers = {"annotations": [{"question_id": 42000, "answer_type": "other", "answers": [{"answer": "cat", "answer_id": i} for i in range(10)]}]}  # fmt: skip
    (folder / "q.json").write_text(json.dumps(questions))
    (folder / "a.json").write_text(json.dumps(answers))
    file = read_vqa(folder / "q.json", annotations=folder / "a.json", images=folder / "images")
    (question,) = file.questions
    assert (question.answers, question.kind) == (tuple(TEN), "other")
    assert isinstance(question.picture, Path)
    assert question.picture.name == "COCO_val2014_000000000042.jpg"
    assert [(row.line, row.index, row.reason) for row in file.bad_rows] == [(2, "5", "no answer among the annotations")]  # fmt: skip


def test_textvqa_and_a_table(folder: Path) -> None:
    (folder / "images" / "t.json").write_text(json.dumps({"data": [{"question_id": 1, "question": "What?", "image_id": "t1", "answers": TEN}]}))  # fmt: skip
    (question,) = read_vqa(folder / "images" / "t.json").questions
    assert isinstance(question.picture, Path)
    assert question.picture.name == "t1.jpg"
    table = f"index\tquestion\tanswer\timage\n9\tWhat?\t['cat', 'dog']\t{INLINE}\n8\ta\tb\tc\td\n"
    (folder / "t.tsv").write_text(table)
    file = read_vqa(folder / "t.tsv")
    assert [(q.name, q.answers) for q in file.questions] == [("9", ("cat", "dog"))]
    assert [(row.line, row.reason) for row in file.bad_rows] == [(3, "5 fields, and 4 columns")]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "is no object"),
        ({**GOOD, "question_id": 2, "question": " "}, "no question"),
        ({**GOOD, "question_id": 2, "question": 5}, "no question"),
        ({**GOOD, "question_id": 2, "question": "\ud800"}, "a lone surrogate"),
        (GOOD, "id 1 is on line 1 already"),
        ({**GOOD, "question_id": 2, "image": "none.jpg"}, "no image 'none.jpg' below"),
        ({**GOOD, "question_id": 2, "image": "../secret.jpg"}, "no image '../secret.jpg' below"),
        ({**GOOD, "question_id": 2, "image": "/etc/passwd"}, "no image '/etc/passwd' below"),
        ({**GOOD, "question_id": 2, "image": "a\0.jpg"}, "no image"),
        ({**GOOD, "question_id": 2, "image": "x" * 250}, "no image"),
        ({**GOOD, "question_id": 2, "image": None}, "no image and no image_id"),
        ({**GOOD, "question_id": 2, "answers": [["x"]]}, "answers are no texts"),
        ({**GOOD, "question_id": 2, "answers": "[x"}, ""),
        ({**GOOD, "question_id": 2, "answers": "[x]"}, "answers are a list that cannot be read"),
    ],
)
def test_bad_rows_are_named_and_reading_goes_on(folder: Path, row: Any, reason: str) -> None:
    file = rows(folder, GOOD, row, {**GOOD, "question_id": 3})
    if not reason:  # a text that only begins like a list is a text
        assert (len(file.questions), file.questions[1].answers) == (3, ("[x",))
        return
    assert [question.name for question in file.questions] == ["1", "3"]
    (bad,) = file.bad_rows
    assert bad.line == 2
    assert reason in bad.reason


def test_a_list_on_one_line_has_entries(folder: Path) -> None:
    path = folder / "images" / "t.json"
    path.write_text(json.dumps([GOOD, GOOD]), encoding="utf-8")
    file = read_vqa(path)
    assert (file.place, file.bad_rows[0].line) == ("entry", 2)
    assert file.bad_rows[0].reason == "id 1 is on entry 1 already"
    with pytest.raises(ConfigError, match="the first entry 2: id 1 is on entry 1"):
        read_vqa(path, strict=True)
    assert rows(folder, GOOD).place == "line"


def test_links_may_not_lead_out_either(folder: Path) -> None:
    (folder / "images" / "link.jpg").symlink_to(folder / "secret.jpg")
    file = rows(folder, GOOD, {**GOOD, "question_id": 2, "image": "link.jpg"})
    assert [row.line for row in file.bad_rows] == [2]


def test_strictly_ten_answers(folder: Path) -> None:
    assert len(rows(folder, GOOD, strict=True).questions) == 1
    with pytest.raises(ConfigError, match="1 answers, strictly 10"):
        rows(folder, GOOD, {**GOOD, "question_id": 2, "answers": ["x"]}, strict=True)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("q.txt", "x", "is not JSON"),
        ("q.txt", "[]", "got q.txt. Allowed"),
        ("q.json", "{}", "got q.json. Allowed"),
        ("q.json", "[", "is not JSON"),
        ("q.json", "[]", "0 good and 0 bad rows"),
        ("q.jsonl", "1\n", "0 good and 1 bad rows, the first line 1: is no object"),
    ],
)
def test_files_that_are_none(folder: Path, name: str, text: str, problem: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_vqa(folder / name)
    with pytest.raises(ConfigError, match="cannot read"):
        read_vqa(folder / "none.json")
    with pytest.raises(ConfigError, match="no folder"):
        read_vqa(folder / name, images=folder / "none")
    (folder / "a.json").write_text("[]")
    with pytest.raises(ConfigError, match="no file of VQAv2's answers"):
        read_vqa(folder / name, annotations=folder / "a.json")
