"""`oval eval mmbench` on a tiny LLaVA with the real loop: report, resuming, two processes, bad rows, and where it writes."""

import base64
import csv
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_llava
import tiny_models
from typer.testing import CliRunner, Result

from oval_adapters.cli.app import create_app
from oval_adapters.evaluation import mm_model, mm_run
from oval_mm.mmbench import PASS_STEP

QUESTIONS = 3
COLUMNS = ["index", "question", "hint", "A", "B", "C", "answer", "category", "image", "l2-category", "split"]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny_models.one_thread()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llava.save_llava(tmp_path_factory.mktemp("llava"))


def row(number: int, **changes: Any) -> dict[str, Any]:
    values = {
        "index": number,
        "question": f"What is in picture {number % PASS_STEP}?",
        "A": "cat",
        "B": "dog",
        "answer": "A",
        "category": ("ocr", "image_scene")[number % 2],
        "image": tiny_llava.png_text(number, (18, 20)),
        "l2-category": "coarse_perception",
        "split": "dev",
    }
    return {**values, **changes}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = []
    for index in range(1, QUESTIONS + 1):
        rows.append(row(index))
        turned = {"A": "dog", "B": "cat", "answer": "B", "image": index}
        rows.append(row(index + PASS_STEP, **turned))
    return write(tmp_path_factory.mktemp("data") / "tiny.tsv", *rows)


@pytest.fixture(scope="module")
def quick(model: Path, data: Path) -> tuple[object, ...]:
    return ("--model", model, "--data", data, "--max-new-tokens", 3, "--dtype", "float32")


@pytest.fixture(autouse=True)
def _answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model runs; then, so that there is something to count, it is taken to say cat for all pictures but 2."""
    real = mm_model.Asker.answer

    def said(self: mm_model.Asker, prompt: str, images: Any) -> str:
        real(self, prompt, images)
        return "It is a dog" if "picture 2" in prompt and "B. cat" in prompt else "It is a cat"

    monkeypatch.setattr(mm_model.Asker, "answer", said)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(create_app(), ["eval", "mmbench", *map(str, arguments)])


def report_of(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    return json.loads(line)


def facts(report: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on the clock, or on how many processes there were."""
    return {key: value for key, value in report.items() if "seconds" not in key and key != "processes"}  # fmt: skip


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def whole(quick: tuple[object, ...], tmp_path: Path) -> dict[str, Any]:
    return report_of(run(*quick, "--out", tmp_path / "whole", "--json"))


def test_the_report_and_the_reason_of_each_verdict(
    quick: tuple[object, ...], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = run(*quick, "--out", out, "--html", tmp_path / "a.html", "--json")
    report = report_of(result)
    assert (report["questions"], report["rows"], report["failed_rows"]) == (3, 6, 0)
    assert report["vanilla"] == 1.0
    assert report["circular"] == pytest.approx(2 / 3)
    assert report["vanilla_all"] == pytest.approx(5 / 6)
    assert report["by_category"]["ocr"] == {"questions": 1, "vanilla": 1.0, "circular": 0.0, "vanilla_all": 0.5}  # fmt: skip
    assert report["by_category"]["image_scene"]["circular"] == 1.0
    assert report["seconds_per_question"] == pytest.approx(report["seconds"] / 6)
    assert (report["rules"], report["scorer"], report["rolled_here"]) == ({"text": 6}, "vlmevalkit", False)  # fmt: skip
    rows = lines(out / "results.jsonl")
    assert [r["index"] for r in rows] == [1, PASS_STEP + 1, 2, PASS_STEP + 2, 3, PASS_STEP + 3]
    assert [r["hit"] for r in rows] == [True, True, True, False, True, True]
    wrong = rows[3]
    assert (wrong["answer"], wrong["extracted"], wrong["rule"], wrong["right"]) == ("It is a dog", "A", "text", "B")  # fmt: skip
    assert wrong["prompt"] == (
        "[<image>What is in picture 2?\nA. dog\nB. cat\n"
        "Answer with the option's letter from the given choices directly.]>"
    )
    (table,) = csv.DictReader((out / "report.csv").open())
    assert (table["split"], float(table["Overall"]), float(table["ocr"])) == ("dev", pytest.approx(2 / 3), 0.0)  # fmt: skip
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    for shown in ("circular: right in every order", "It is a dog", "image_scene", "66.7"):
        assert shown in page
    assert "image_scene" in result.stderr
    assert sorted(path.name for path in out.iterdir()) == [
        "failed_rows.jsonl",
        "report.csv",
        "results.jsonl",
        "rows-0.jsonl",
        "run.json",
    ]


def test_vanilla_asks_the_first_order_only(quick: tuple[object, ...]) -> None:
    report = report_of(run(*quick, "--vanilla", "--limit", 2, "--json"))
    assert (report["questions"], report["rows"], report["vanilla"], report["circular"]) == (2, 2, 1.0, None)  # fmt: skip


def test_a_file_without_rolled_rows_is_rolled_here(quick: tuple[object, ...], tmp_path: Path) -> None:  # fmt: skip
    path = write(tmp_path / "a.tsv", row(1), row(2, C="owl"))
    plain = report_of(run(*quick, "--data", path, "--json"))
    assert (plain["rows"], plain["circular"], plain["rolled_here"]) == (2, None, False)
    result = run(*quick, "--data", path, "--circular", "--json")
    rolled = report_of(result)
    assert (rolled["rows"], rolled["rolled_here"], rolled["incomplete_groups"]) == (5, True, 0)
    assert "were made here" in result.stderr


def test_a_run_that_was_cut_off_goes_on(
    quick: tuple[object, ...], whole: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    ask_all, out = mm_run.ask_all, tmp_path / "out"

    def interrupted(*arguments: Any) -> Iterator[Any]:
        rows = ask_all(*arguments)
        yield next(rows)
        yield next(rows)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mm_run, "ask_all", interrupted)
        result = run(*quick, "--out", out, "--json")
    assert result.exit_code == 130
    assert (json.loads(result.stdout)["rows"], json.loads(result.stdout)["whole"]) == (2, False)
    assert "2 of 6 are done; --resume goes on" in result.stderr
    with (out / "rows-0.jsonl").open("a") as file:
        file.write('{"unit": 2, "name"')  # as a power cut leaves it
    before = lines(out / "results.jsonl")
    refused = run(*quick, "--out", out)
    assert (refused.exit_code, "holds an earlier run" in refused.stderr) == (2, True)
    other = run(*quick, "--out", out, "--resume", "--blank-images")
    assert (other.exit_code, "other prompts or settings" in other.stderr) == (2, True)
    again = report_of(run(*quick, "--out", out, "--resume", "--json"))
    assert facts(again) == facts(whole)
    assert lines(out / "results.jsonl")[:2] == before
    monkeypatch.setattr(mm_run, "_asker", None)  # nothing is left to ask: no model is loaded
    strict = report_of(run(*quick, "--out", out, "--resume", "--strict", "--json"))
    assert (strict["scorer"], strict["vanilla"], strict["seconds"]) == ("strict", 0.0, again["seconds"])  # fmt: skip


def test_a_damaged_line_is_named(quick: tuple[object, ...], whole: dict[str, Any], tmp_path: Path) -> None:  # fmt: skip
    rows = tmp_path / "whole" / "rows-0.jsonl"
    rows.write_text("{}\n" + rows.read_text())
    result = run(*quick, "--out", tmp_path / "whole", "--resume")
    assert (result.exit_code, "line 1 of" in result.stderr) == (2, True)


def test_bad_rows_are_told_by_line_and_nothing_is_written_elsewhere(
    quick: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = base64.b64encode(b"no image " * 20).decode()
    path = write(
        tmp_path / "bad.tsv",
        row(1),
        row(2, index="../../escaped"),
        row(3, image=broken),
        row(4, question="See <image> here"),
        row(5, hint="long " * 500),
        row(6, category="../../escaped/" + "<b>"),
    )
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    before = sorted(tmp_path.rglob("*"))
    result = run(*quick, "--data", path, "--out", "out", "--html", "a.html", "--json")
    report = report_of(result)
    assert (report["questions"], report["failed_rows"], report["rows"]) == (2, 4, 5)
    reasons = {failed["line"]: failed["reason"] for failed in report["failures"]}
    assert list(reasons) == [3, 4, 5, 6]
    for line, reason in {3: "no whole number", 4: "cannot be read", 5: "stands for an image", 6: "tokens and 3 for the answer"}.items():  # fmt: skip
        assert reason in reasons[line]
        assert f"line {line}" in result.stderr
    new = set(tmp_path.rglob("*")) - set(before)
    out = place / "out"
    assert new == {out, place / "a.html", *out.iterdir()}
    assert [failed["line"] for failed in lines(out / "failed_rows.jsonl")] == [3, 4, 5, 6]
    assert "<b>" not in (place / "a.html").read_text(encoding="utf-8")
    strict = run(*quick, "--data", path, "--strict")
    assert (strict.exit_code, "Allowed: none with --strict" in strict.stderr) == (2, True)


def test_a_run_of_which_no_row_could_be_asked_fails(quick: tuple[object, ...], tmp_path: Path) -> None:  # fmt: skip
    path = write(tmp_path / "a.tsv", row(1, question="<image>"))
    result = run(*quick, "--data", path)
    assert (result.exit_code, "none of 1 rows could be asked" in result.stderr) == (2, True)


@pytest.mark.slow
def test_two_processes_have_the_report_of_one(
    quick: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the other process has no patched answers
    alone = report_of(run(*quick, "--json"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    arguments = [*map(str, quick), "--out", str(tmp_path / "out"), "--json"]
    program = "from oval_adapters.cli import main; main()"
    other = subprocess.Popen(
        [sys.executable, "-c", program, "eval", "mmbench", *arguments],
        env=os.environ | {"RANK": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        monkeypatch.setenv("RANK", "0")
        both = report_of(run(*arguments))
        said, wrong = other.communicate(timeout=60)
    finally:
        other.kill()
        other.wait()
    assert (other.returncode, said, wrong) == (0, "", "")
    assert both["processes"] == 2
    assert facts(both) == facts(alone)
    own = [len(lines(tmp_path / "out" / f"rows-{rank}.jsonl")) for rank in range(2)]
    assert own == [3, 3]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--data", "/nowhere.tsv"), "data: cannot read /nowhere.tsv"),
        (("--limit", "0"), "limit: got 0"),
        (("--max-new-tokens", "0"), "max-new-tokens: got 0"),
        (("--resume",), "resume: got it without --out"),
        (("--html", "/nowhere/a.html"), "html: no folder"),
        (("--prompt", "lava"), "did you mean 'llava'?"),
        (("--dtype", "float31"), "did you mean 'float32'?"),
        (("--device", "tpu"), "device: got 'tpu'"),
        (("--model", "/nowhere"), "/nowhere"),
        (("--config", "nosuch"), "nosuch"),
    ],
)
def test_an_error_is_one_line(
    quick: tuple[object, ...], arguments: tuple[str, ...], problem: str
) -> None:
    result = run(*quick, *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    said = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert problem in said[0]
    assert "Traceback" not in result.stderr


def test_a_model_that_sees_nothing_is_refused(quick: tuple[object, ...], tmp_path: Path) -> None:
    folder = tiny_models.save_checkpoint(tmp_path, None)
    result = run(*quick, "--model", folder)
    assert (result.exit_code, "sees no images on OVAL" in result.stderr) == (2, True)
