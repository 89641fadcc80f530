"""`oval eval vqa` on a tiny LLaVA: soft accuracy, rows that fail, resuming, and where it writes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_llava
import tiny_models
from PIL import Image
from typer.testing import CliRunner, Result

from oval_adapters.cli.app import create_app
from oval_adapters.evaluation import mm_model, mm_run


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny_models.one_thread()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llava.save_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for seed in range(4):
        Image.new("RGB", (20, 18), (60 * seed, 0, 0)).save(tmp_path / f"{seed}.png")
    (tmp_path / "broken.png").write_bytes(b"x" * 40)
    rows = [
        {"question_id": "../../a", "question": "Which?", "answers": ["The cat."] * 2 + ["dog"] * 8, "image": "0.png", "category": "animals"},
        {"question_id": 2, "question": "Which?", "answers": ["cat"] * 10, "image": "1.png", "category": "animals"},
        {"question_id": 3, "question": "Which?", "answer": "a Cat", "image": "2.png"},
        {"question_id": 4, "question": "Which?", "image": "3.png"},
        {"question_id": 5, "question": "Which?", "answers": ["cat"] * 10, "image": "broken.png"},
        {"question_id": 6, "question": "Which?", "answers": ["cat"] * 10, "image": "../../none.png"},
    ]  # fmt: skip
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def quick(model: Path, data: Path) -> tuple[object, ...]:
    return ("--model", model, "--data", data, "--max-new-tokens", 2, "--dtype", "float32")


@pytest.fixture(autouse=True)
def _answers(monkeypatch: pytest.MonkeyPatch) -> None:
    real = mm_model.Asker.answer
    monkeypatch.setattr(mm_model.Asker, "answer", lambda *a: (real(*a), "A cat.")[1])


def run(*arguments: object) -> Result:
    return CliRunner().invoke(create_app(), ["eval", "vqa", *map(str, arguments)])


def test_soft_accuracy_and_rows_that_fail(quick: tuple[object, ...], tmp_path: Path) -> None:
    before = set(tmp_path.rglob("*"))
    out = tmp_path / "out"
    result = run(*quick, "--out", out, "--html", tmp_path / "a.html", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["questions"] == 3
    assert report["accuracy"] == pytest.approx((0.6 + 1 + 1) / 3)
    assert report["by_kind"] == {"animals": {"questions": 2, "accuracy": pytest.approx(0.8)}}
    assert (report["rows"], report["failed_rows"], report["unscored_rows"], report["without_ten_answers"]) == (5, 2, 1, 1)  # fmt: skip
    assert [failed["line"] for failed in report["failures"]] == [5, 6]
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [(r["index"], r["extracted"], r["rule"], r["score"]) for r in rows] == [
        ("../../a", "cat", "soft", pytest.approx(0.6)),
        ("2", "cat", "soft", 1.0),
        ("3", "cat", "exact", 1.0),
        ("4", None, None, None),
        ("5", None, None, None),
    ]
    assert rows[0]["prompt"] == "[<image>Which?\nAnswer the question using a single word or phrase.]>"  # fmt: skip
    for said in ("line 5", "line 6", "1 questions have not ten answers"):
        assert said in result.stderr
    assert "animals" in (tmp_path / "a.html").read_text()
    assert set(tmp_path.rglob("*")) - before == {out, tmp_path / "a.html", *out.iterdir()}


def test_strictly(quick: tuple[object, ...], data: Path) -> None:
    refused = run(*quick, "--strict")
    assert (refused.exit_code, "Allowed: none with --strict" in refused.stderr) == (2, True)
    rows = data.read_text().splitlines(keepends=True)
    data.write_text("".join([rows[0], rows[4]]))
    report = json.loads(run(*quick, "--strict", "--json").stdout)
    assert (report["questions"], report["accuracy"]) == (2, pytest.approx(0.3))


def test_a_run_that_was_cut_off_goes_on(
    quick: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def report(*more: object) -> dict[str, Any]:
        return json.loads(run(*quick, *more, "--json").stdout)

    whole, ask_all, out = report(), mm_run.ask_all, tmp_path / "out"

    def interrupted(*arguments: Any) -> Iterator[Any]:
        yield next(ask_all(*arguments))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mm_run, "ask_all", interrupted)
        assert run(*quick, "--out", out).exit_code == 130
    again = report("--out", out, "--resume")
    assert {k: v for k, v in again.items() if "seconds" not in k} == {k: v for k, v in whole.items() if "seconds" not in k}  # fmt: skip
