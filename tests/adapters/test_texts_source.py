"""Files of texts: every form is read, and what cannot be read is named with its line."""

import gzip
import json
from pathlib import Path

import pytest

from oval_adapters.texts import read_source
from oval_core.errors import ConfigError


def write(path: Path, *rows: object) -> Path:
    data = "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    raw = data.encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def test_wikitext_escapes_are_undone_and_sentences_become_turns(tmp_path: Path) -> None:
    text = " = Heading of a page = \n A guest @-@ star earned 1 @,@ 500 coins . He spent 2 @.@ 5 of them on bread .\n"
    source = read_source(write(tmp_path / "wiki.txt", text))
    assert "guest-star earned 1,500 coins . He spent 2.5 of" in source.text
    assert source.dialogues == (
        ("A guest-star earned 1,500 coins .", "He spent 2.5 of them on bread ."),
    )


def test_questions_with_answers(tmp_path: Path) -> None:
    row = {"question": "How many?", "answer": "48/2 = <<48/2=24>>24 clips.\n#### 24"}
    source = read_source(write(tmp_path / "maths.jsonl", row, "\n", row))
    assert source.dialogues == (("How many?", "48/2 = 24 clips.\n#### 24"),) * 2
    assert source.text.count("How many?\n48/2 = 24 clips.") == 2


def test_turns_without_answers_get_replies(tmp_path: Path) -> None:
    source = read_source(write(tmp_path / "bench.jsonl", {"turns": ["One?", "Two?"], "id": 1}))
    (dialogue,) = source.dialogues
    assert dialogue[::2] == ("One?", "Two?")
    assert len(dialogue) == 4
    assert all(dialogue[1::2])
    assert source.text == "One?\n\nTwo?"


def test_a_row_where_somebody_says_nothing_is_text_only(tmp_path: Path) -> None:
    rows = [{"question": "Why?", "answer": " "}, {"turns": ["Go.", ""]}]
    source = read_source(write(tmp_path / "gaps.jsonl", *rows))
    assert source.dialogues == ()
    assert "Why?" in source.text
    assert "Go." in source.text


def test_text_rows_and_key_values_in_gzip(tmp_path: Path) -> None:
    rows = (
        {"text": "A sentence of good length. And another one of such."},
        {"ordered_kv_records": [["k", "v"]]},
    )
    source = read_source(write(tmp_path / "mixed.jsonl.gz", *rows))
    assert source.records == ((("k", "v"),),)
    assert '"k": "v"' in source.text
    assert source.dialogues[0] == ("A sentence of good length.", "And another one of such.")


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("a.jsonl", [{"text": "x"}, "{broken\n"], "line 2 of a.jsonl is not JSON"),
        ("a.jsonl", [{"text": "x"}, "\n", {"txt": "x", "b": 1}], "line 3 of a.jsonl.*got b, txt"),
        ("a.jsonl", ["[1]\n"], "line 1 of a.jsonl.*got list"),
        ("a.jsonl", [{"turns": ["x", 1]}], "line 1 of a.jsonl.*got turns"),
        ("a.jsonl", [{"ordered_kv_records": [["k"]]}], "got ordered_kv_records"),
        ("a.jsonl", [{"ordered_kv_records": [["k", ""]]}], "got ordered_kv_records"),
        ("a.txt", [" \n "], "holds no text"),
        ("a.jsonl", ["\n"], "holds no text"),
    ],
)
def test_bad_content(tmp_path: Path, name: str, rows: list, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_source(write(tmp_path / name, *rows))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"\xff\xfe", "not UTF-8 text: byte 0 is 0xff"),
        ("a.jsonl.gz", b"plain", "no whole gzip file"),
        ("b.jsonl.gz", gzip.compress(b"cut off" * 100, mtime=0)[:20], "no whole gzip file"),
        (
            "c.txt.gz",
            gzip.compress(b"damaged" * 100, mtime=0)[:-8] + b"12345678",
            "no whole gzip file",
        ),
    ],
)
def test_bad_bytes(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        read_source(tmp_path / name)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read .*nowhere.txt: No such file"):
        read_source(tmp_path / "nowhere.txt")
    with pytest.raises(ConfigError, match="cannot read"):
        read_source(tmp_path)
