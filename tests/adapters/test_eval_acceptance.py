"""`oval eval acceptance` on a tiny model with the real loop: its JSON, two processes, resuming, and its errors."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from typer.testing import CliRunner, Result

from oval_adapters.cli.app import create_app
from oval_adapters.evaluation import run as evaluation_run
from oval_adapters.evaluation.kept_rows import KeptRows
from oval_adapters.evaluation.rows import Row
from oval_adapters.evaluation.totals import pooled

KEYS = {
    "prompts",
    "identical",
    "tau",
    "tau_by_category",
    "accepted_by_position",
    "draft_acceptance_rate",
    "tokens_per_s",
    "plain_tokens_per_s",
    "speedup",
    "page_hit_rate",
    "stall_s",
}
NEW_TOKENS = 12
MAIN = "ngram:ngram_min=1"
TEMPLATE = (
    "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny_models.one_thread()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_checkpoint(tmp_path_factory.mktemp("tiny"), TEMPLATE)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five prompts of two categories, mixed."""
    rows = [
        {"question_id": i, "category": ("qa", "rag")[i % 2], "turns": [f"the mill and {'the ' * i}mill", "b"]}
        for i in range(5)
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("prompts") / "five.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def quick(folder: Path, prompts: Path) -> tuple[object, ...]:
    given = ("--model", folder, "--prompts", prompts, "--max-new-tokens", NEW_TOKENS)
    return (*given, "--spec", f"{MAIN},none", "--max-nodes", 4)


@pytest.fixture(scope="module")
def whole(
    quick: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[Row], str]:
    """The report of an undisturbed run, its rows, and what it said."""
    out = tmp_path_factory.mktemp("whole") / "out"
    result = run(*quick, "--out", out, "--json")
    return report_of(result), rows_in(out), result.stderr


def run(*arguments: object) -> Result:
    return CliRunner().invoke(create_app(), ["eval", "acceptance", *map(str, arguments)])


def report_of(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    return json.loads(line)


def facts(report: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on the clock."""
    timed = ("tokens_per_s", "speedup", "stall", "interval", "processes")
    own = {k: v for k, v in report.items() if not any(name in k for name in timed)}
    for parts in ("drafters", "baselines"):
        own[parts] = {label: facts(own_) for label, own_ in report.get(parts, {}).items()}
    return own


def rows_in(folder: Path) -> list[Row]:
    stamp = json.loads((folder / "run.json").read_text(encoding="utf-8"))["stamp"]
    return KeptRows(folder, stamp, resume=True).read()


def test_the_figures_are_those_of_the_texts(
    whole: tuple[dict[str, Any], list[Row], str],
) -> None:
    report, rows, said = whole
    assert set(report) >= KEYS
    assert set(report["drafters"]) == {"none"}
    assert set(report["drafters"]["none"]) >= KEYS
    assert set(report["baselines"]) == {"plain"}
    for side in (report, report["drafters"]["none"], report["baselines"]["plain"]):
        assert (side["prompts"], side["identical"], side["partings"]) == (5, 5, [])
    assert [row.names for row in rows] == [("0",), ("2",), ("4",), ("1",), ("3",)]
    # counted apart from the loop's own counters: which tokens came with no forward between
    arrivals = [row.sides[MAIN].arrivals or () for row in rows]
    steps = [came for own in arrivals for came in own[1:]]
    assert all(own[0] == 1 for own in arrivals)
    assert report["tau"] == pytest.approx(sum(steps) / len(steps))
    assert report["steps"] == len(steps)
    assert report["new_tokens"] == sum(map(sum, arrivals)) == 5 * NEW_TOKENS
    assert 1 < report["tau"] <= 4
    by_position = report["accepted_by_position"]
    assert by_position == sorted(by_position, reverse=True)
    counts = pooled([row.sides[MAIN].counts for row in rows])
    assert counts is not None
    assert counts.draft_acceptance_rate == report["draft_acceptance_rate"]
    none = report["drafters"]["none"]
    assert (none["tau"], none["accepted_by_position"]) == (1, [])
    assert none["draft_acceptance_rate"] is None
    assert set(report["tau_by_category"]) == {"qa", "rag"}
    assert report["page_hit_rate"] is None
    assert "no tiers" in report["page_hit_rate_reason"]
    assert report["later_turns_not_asked"] == 5
    for shown in ("acceptance", "speed", "tau by category", "tau: ", "5 later turns"):
        assert shown in said


def test_against_hugging_face(quick: tuple[object, ...]) -> None:
    report = report_of(run(*quick, "--against", "hf", "--per-category", 1, "--json"))
    assert set(report["baselines"]) == {"plain", "hf"}
    hf = report["baselines"]["hf"]
    assert (hf["prompts"], hf["identical"], hf["tau"]) == (2, 2, None)
    assert hf["plain_tokens_per_s"] == report["plain_tokens_per_s"]


@pytest.mark.slow
def test_two_processes_have_the_totals_of_one(
    quick: tuple[object, ...],
    whole: tuple[dict[str, Any], list[Row], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    arguments = [*map(str, quick), "--out", str(tmp_path / "out"), "--json"]
    environment = os.environ | {"RANK": "1", "OMP_NUM_THREADS": "1"}
    program = "from oval_adapters.cli import main; main()"
    other = subprocess.Popen(
        [sys.executable, "-c", program, "eval", "acceptance", *arguments],
        env=environment,
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
    assert facts(both) == facts(whole[0])
    files = sorted(path.name for path in (tmp_path / "out").glob("rows-*"))
    assert files == ["rows-0.jsonl", "rows-1.jsonl"]
    own = [len((tmp_path / "out" / name).read_text().splitlines()) for name in files]
    assert own == [3, 2]


def test_a_run_that_was_cut_off_goes_on(
    quick: tuple[object, ...],
    whole: tuple[dict[str, Any], list[Row], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measure, out = evaluation_run.measure, tmp_path / "out"

    def interrupted(*arguments: Any) -> Iterator[Any]:
        rows = measure(*arguments)
        yield next(rows)
        yield next(rows)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(evaluation_run, "measure", interrupted)
        result = run(*quick, "--out", out, "--json")
    assert result.exit_code == 130
    part = json.loads(result.stdout)
    assert (part["prompts"], part["whole"]) == (2, False)
    assert "2 of 5 are done; --resume goes on" in result.stderr
    assert "Traceback" not in result.stderr
    before = rows_in(out)
    refused = run(*quick, "--out", out)
    assert (refused.exit_code, "holds an earlier run" in refused.stderr) == (2, True)
    other = run(*quick, "--out", out, "--resume", "--seed", 1)
    assert (other.exit_code, "other prompts or settings" in other.stderr) == (2, True)
    again = report_of(run(*quick, "--out", out, "--resume", "--json"))
    assert facts(again) == facts(whole[0])
    assert rows_in(out)[:2] == before
    once_more = report_of(run(*quick, "--out", out, "--resume", "--json"))
    assert once_more["speedup"] == again["speedup"]  # nothing was measured anew


def test_batches_sampling_and_a_page(quick: tuple[object, ...], tmp_path: Path) -> None:
    batches = report_of(
        run(*quick, "--batch-size", 2, "--limit", 4, "--html", tmp_path / "a.html", "--json")
    )
    assert (batches["prompts"], batches["identical"]) == (4, 4)
    assert batches["prompts_by_category"] == {"qa": 2, "rag": 2}
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "Accepted by position" in page
    assert "how their tokens came" not in page  # of prompts decoded together nobody can tell
    sampled = report_of(
        run(*quick, "--temperature", 0.8, "--limit", 2, "--html", tmp_path / "b.html", "--json")
    )
    assert (sampled["prompts"], sampled["identical"], sampled["partings"]) == (2, None, [])
    assert sampled["tau"] >= 1
    page = (tmp_path / "b.html").read_text(encoding="utf-8")
    assert "how their tokens came: ngram" in page


def test_a_plot(quick: tuple[object, ...], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run(*quick, "--limit", 2, "--plot", tmp_path / "a.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_with_tiers_pages_are_counted(quick: tuple[object, ...]) -> None:
    result = run(*quick, "--fast-tokens", 96, "--limit", 2, "--json")
    report = report_of(result)
    assert (report["identical"], report["page_hit_rate_reason"]) == (2, None)
    for side in (report, report["baselines"]["plain"]):
        assert 0 < side["page_hit_rate"] <= 1
        assert side["stall_s"] >= 0
    assert "pages" in result.stderr


def test_prompts_that_are_too_long_are_named(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("short\n" + "x" * 700 + "\n", encoding="utf-8")
    result = run("--model", folder, "--prompts", path, "--spec", "ngram", "--max-new-tokens", 4, "--json")  # fmt: skip
    report = report_of(result)
    assert report["prompts"] == 1
    assert report["skipped"] == [
        {"name": "2", "category": "p", "prompt_tokens": 703}
    ]  # in the template
    assert "1 prompts skipped, too long for the model (tokens): 2 (703)" in result.stderr
    path.write_text("x" * 700, encoding="utf-8")
    result = run("--model", folder, "--prompts", path, "--spec", "ngram", "--max-new-tokens", 4)
    assert result.exit_code == 2
    assert "the shortest of 703 tokens" in result.stderr


def test_texts_that_part_are_told_with_their_margin(
    quick: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = evaluation_run.decode

    def wrong(oval: Any, side: Any, unit: Any, settings: Any) -> Any:
        row = decode(oval, side, unit, settings)
        if side.label != "none" or unit.number != 1:
            return row
        (ids,) = row.ids
        other = (ids[5] + 1) % 200 + 10
        return type(row)(
            **{**{n: getattr(row, n) for n in row.__slots__}, "ids": ((*ids[:5], other, *ids[6:]),)}
        )

    monkeypatch.setattr(evaluation_run, "decode", wrong)
    report = report_of(run(*quick, "--limit", 3, "--json"))
    assert report["identical"] == 3
    none = report["drafters"]["none"]
    assert none["identical"] == 2
    ((parting,)) = none["partings"]
    assert (parting["name"], parting["category"], parting["step"]) == ("2", "qa", 5)
    assert parting["margin"] > 0.01  # the model's own token was the better one


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--spec", "ngramm"), "did you mean 'ngram'?"),
        (("--spec", "ngram:depth=0"), "depth: got 0"),
        (("--prompts", "/nowhere.jsonl"), "cannot read"),
        (("--limit", "0"), "limit: got 0"),
        (("--per-category", "-1"), "per-category: got -1"),
        (("--max-new-tokens", "1"), "max-new-tokens: got 1"),
        (("--batch-size", "0"), "batch-size: got 0"),
        (("--temperature", "-1"), "temperature: got -1"),
        (("--seed", "-1"), "seed: got -1"),
        (("--against", "vllm"), "against: got 'vllm'"),
        (("--resume",), "resume: got it without --out"),
        (("--html", "/nowhere/a.html"), "html: no folder"),
        (("--html", "."), "html: got ., a folder"),
        (("--plot", "."), "plot: got ., a folder"),
        (("--out", "/dev/null/run"), "out: got /dev/null/run"),
        (("--heads", "/nowhere", "--spec", "medusa"), "/nowhere"),
        (("--model", "smoll"), "did you mean 'smol'?"),
        (("--link-gbps", "2"), "without --fast-tokens"),
    ],
)
def test_an_error_is_one_line(
    quick: tuple[object, ...], arguments: tuple[str, ...], problem: str
) -> None:
    result = run(*quick, *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert line.startswith("error: ")
    assert problem in line
    assert "Traceback" not in line
