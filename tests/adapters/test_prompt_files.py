"""Files of prompts: every form that is known, and one line that says what is wrong with a bad one."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from oval_adapters.evaluation.prompt_files import EvalPrompt, read_prompts, take
from oval_core.errors import ConfigError


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def turns(number: int, category: str, *texts: str) -> dict[str, Any]:
    return {"question_id": number, "category": category, "turns": list(texts)}


def test_spec_bench_counts_the_categories_of_mt_bench_as_one(tmp_path: Path) -> None:
    rows = (turns(81, "writing", "Write.", "Again."), turns(90, "math", "Add."), turns(300, "qa", "Who?"))  # fmt: skip
    assert read_prompts(write(tmp_path / "spec.jsonl", *rows)) == [
        EvalPrompt(name="81", category="mt_bench", text="Write.", num_later_turns=1),
        EvalPrompt(name="90", category="mt_bench", text="Add."),
        EvalPrompt(name="300", category="qa", text="Who?"),
    ]


def test_mt_bench_keeps_its_categories(tmp_path: Path) -> None:
    path = write(tmp_path / "mt.jsonl", turns(1, "writing", "a"), turns(2, "stem", "b"))
    assert [prompt.category for prompt in read_prompts(path)] == ["writing", "stem"]


def test_questions_prompts_and_strings(tmp_path: Path) -> None:
    gsm8k = {"question": "How many?", "answer": "2"}
    humaneval = {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "..."}
    path = write(tmp_path / "mix.v1.jsonl", gsm8k, humaneval, "Just text.")
    found = [(p.name, p.category, p.text) for p in read_prompts(path)]
    assert found == [
        ("1", "mix", "How many?"),
        ("HumanEval/0", "mix", "def f():\n"),
        ("3", "mix", "Just text."),
    ]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "prompts"])
def test_a_prompt_a_line(tmp_path: Path, name: str) -> None:
    data = '\ufefffirst {"no": json}\r\n\n  second line \n'.encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    found = [(p.name, p.text) for p in read_prompts(path)]
    assert found == [("1", 'first {"no": json}'), ("3", "second line")]
    assert {p.category for p in read_prompts(path)} == {name.partition(".")[0]}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"turns": ["a"]', "is not JSON"),
        ('{"turns": []}', "holds no prompt: got the fields turns"),
        ('{"turns": ["a", 3]}', "holds no prompt: got the fields turns"),
        ('{"turns": "a", "question": "b"}', "holds no prompt: got the fields question, turns"),
        ('{"text": "a"}', "holds no prompt: got the fields text"),
        ("{}", "holds no prompt: got the fields (none)"),
        ("3", "holds no prompt: got int"),
        ('["a"]', "holds no prompt: got list"),
        ('"  "', "is an empty prompt"),
        ('{"question": ""}', "is an empty prompt"),
        ('{"question": "a", "category": 3}', "category: got 3"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f'"good"\n\n{line}\n', encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_prompts(path)
    assert "line 3 of bad.jsonl" in str(caught.value)
    assert problem in str(caught.value)
    assert "Allowed: " in str(caught.value)


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("a.txt", b" \n\n", "holds no prompt"),
        ("a.jsonl", b"", "holds no prompt"),
        ("a.txt", b"caf\xe9", "byte 3 is 0xe9"),
        ("a.txt.gz", gzip.compress(b"whole", mtime=0)[:-6], "no whole gzip file"),
        ("a.txt.gz", b"plain", "no whole gzip file"),
        ("none.txt", None, "cannot read"),
    ],
)
def test_a_file_that_cannot_be_used(
    tmp_path: Path, name: str, data: bytes | None, problem: str
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=problem):
        read_prompts(tmp_path / name)


def test_taking_some() -> None:
    prompts = [EvalPrompt(name=str(i), category="ab"[i % 2], text="x") for i in range(6)]
    assert [p.name for p in take(prompts, None, None)] == ["0", "1", "2", "3", "4", "5"]
    assert [p.name for p in take(prompts, 3, None)] == ["0", "1", "2"]
    assert [p.name for p in take(prompts, None, 2)] == ["0", "1", "2", "3"]
    assert [p.name for p in take(prompts, 3, 2)] == ["0", "1", "2"]
    for limits in ((0, None), (None, -1)):
        with pytest.raises(ConfigError, match="Allowed: 1 or more"):
            take(prompts, *limits)
