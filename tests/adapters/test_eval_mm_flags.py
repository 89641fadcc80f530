"""Budgets of image tokens, speculation, and a comparison with an earlier run, in `oval eval mmbench` and `vqa`."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_llava
import tiny_models
from typer.testing import CliRunner, Result

from oval_adapters.cli.app import create_app
from oval_adapters.cli.vision_options import VisionOptions, parse_budget
from oval_adapters.evaluation import mm_model, mm_page, mm_run
from oval_adapters.evaluation.mm_against import compare, read_results
from oval_core.config import OvalConfig
from oval_core.errors import ConfigError
from oval_mm.paired import paired

COLUMNS = ["index", "question", "A", "B", "answer", "category", "image"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny_models.one_thread()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llava.save_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "tiny.tsv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, delimiter="\t", lineterminator="\n")
        writer.writeheader()
        for index in (1, 2):
            cells = {
                "A": "cat",
                "B": "dog",
                "answer": "A",
                "category": "x",
                "image": tiny_llava.png_text(index),
            }
            writer.writerow({"index": index, "question": "What is it?", **cells})
    return path


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page a patch: the tiny picture has 2 x 2 of them."""
    path = tmp_path_factory.mktemp("config") / "tiles.yaml"
    path.write_text("# tiles of one patch\nvision:\n  tile: 1\n", encoding="utf-8")
    return path


def run(command: str, model: Path, data: Path, *more: object) -> Result:
    arguments = ["eval", command, "--model", model, "--data", data, "--dtype", "float32", "--max-new-tokens", 4]  # fmt: skip
    return CliRunner().invoke(create_app(), [str(part) for part in (*arguments, *more, "--json")])


def report_of(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return report


def test_without_flags_every_image_token_is_read(model: Path, data: Path) -> None:
    report = report_of(run("mmbench", model, data))
    assert (report["image_budget"], report["image_router"]) == (None, None)
    assert (report["image_tokens"], report["image_tokens_read"]) == (8, 8)


@pytest.mark.parametrize(("budget", "read"), [("50%", 4), ("0.25", 2), ("3", 6), ("100%", 8)])
def test_a_budget_is_kept_and_told(
    model: Path, data: Path, tiles: Path, budget: str, read: int
) -> None:
    flags = ("--config", tiles, "--budget", budget, "--router", "random", "--router-seed", 3)
    result = run("mmbench", model, data, *flags)
    report = report_of(result)
    assert report["image_router"] == "random"
    assert report["image_budget"] == parse_budget(budget)
    assert (report["image_tokens"], report["image_tokens_read"]) == (8, read)
    assert report["settings"]["image_budget"]["seed"] == 3
    assert f"{read / 8:.0%} of the image tokens read" in result.stderr


def test_what_was_read_outlives_a_resumed_run(
    model: Path, data: Path, tiles: Path, tmp_path: Path
) -> None:
    flags = ("--config", tiles, "--budget", "2", "--out", tmp_path / "out")
    report_of(run("mmbench", model, data, *flags))
    again = report_of(run("mmbench", model, data, *flags, "--resume"))
    assert again["image_tokens_read"] == 4
    rows = read_results(tmp_path / "out")
    assert [row["image_tokens_read"] for row in rows] == [2, 2]
    other = run("mmbench", model, data, *flags[:3], "1", *flags[4:], "--resume")
    assert other.exit_code == 2, "another budget is another run"
    assert "(config.vision.budget_tokens 2 there, 1 here)" in other.stderr


def test_a_folder_that_is_scored_anew_keeps_what_is_known_of_its_run(
    model: Path, data: Path, tmp_path: Path
) -> None:
    flags = ("--dtype", "auto", "--out", tmp_path / "out")
    first = report_of(run("mmbench", model, data, *flags))
    again = report_of(run("mmbench", model, data, *flags, "--resume", "--strict"))
    assert first["dtype"] != "auto"
    assert [again[name] for name in ("dtype", "backend")] == [first[name] for name in ("dtype", "backend")]  # fmt: skip
    fewer = run("mmbench", model, data, *flags, "--resume", "--limit", 1)
    assert "(the prompts differ, not the settings)" in fewer.stderr


@pytest.mark.parametrize("command", ["mmbench", "vqa"])
def test_a_page_that_cannot_be_written_is_refused_before_a_question(
    model: Path, data: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mm_run, "collect", _never)
    for flags, word in ((("--html", tmp_path), "html: got"), (("--out", data), "out: got")):
        result = run(command, model, data, *flags)
        assert (result.exit_code, word in result.stderr) == (2, True), result.output


def test_the_report_is_out_before_its_page_is_written(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "a.html"
    monkeypatch.setattr(mm_page, "render_mm_page", lambda report: page.mkdir() or "")
    result = run("mmbench", model, data, "--html", page, "--out", tmp_path / "out")
    assert (result.exit_code, "html: cannot write" in result.stderr) == (2, True)
    assert json.loads(result.stdout.splitlines()[-1])["rows"] == 2
    assert len(read_results(tmp_path / "out")) == 2


def test_smaller_pages_and_a_note_where_pages_are_few(model: Path, data: Path) -> None:
    few = run("mmbench", model, data, "--budget", "33%", "--tile", 2)
    report = report_of(few)
    assert report["image_tokens_read"] == report["image_tokens"], "one page a picture, kept"
    assert "100% of the image tokens were read where 33% were asked for: a question has 1 image pages" in few.stderr  # fmt: skip
    more = run("mmbench", model, data, "--budget", "50%", "--tile", 1)
    assert report_of(more)["image_tokens_read"] == 4
    assert "were asked for" not in more.stderr
    for tile in (0, 6):
        assert "vision.tile" in run("mmbench", model, data, "--tile", tile).stderr


def test_settings_at_fault_end_the_run_and_blame_no_row(
    model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> str:
        raise ConfigError("speculation.tree: got 'zz'. Allowed: auto. Name it.")

    monkeypatch.setattr(mm_model.Asker, "answer", fail)
    result = run("mmbench", model, data)
    assert result.exit_code == 2
    assert "error: speculation.tree" in result.stderr
    assert "Mend the file" not in result.stderr


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--budget", "1", "--router", "nope"), "vision.router: got 'nope'"),
        (("--budget", "1", "--router", "/tmp/nowhere"), "fusion router /tmp/nowhere"),
        (("--budget", "1", "--router", "clip"), "vision.clip: got null"),
        (("--budget", "1", "--router", "clip", "--clip", "nosuch"), "vision.clip: 'nosuch'"),
        (("--budget", "133%"), "at most 100%"),
        (("--spec", "ngram", "--tree", "zz"), "speculation.tree: got 'zz'"),
        (("--spec", "medusa", "--heads", "nosuch"), "speculation.heads: got 'nosuch'"),
    ],
)
def test_names_are_checked_before_the_model_is_looked_for(
    tmp_path: Path, data: Path, flags: tuple[str, ...], word: str
) -> None:
    result = run("mmbench", tmp_path / "no model", data, *flags)
    assert (result.exit_code, word in result.stderr) == (2, True), result.output


def _never(*arguments: object, **named: object) -> None:
    raise AssertionError("the questions were asked")


def test_the_downsampling_control_reads_all_of_a_coarser_picture(model: Path, data: Path) -> None:
    report = report_of(run("mmbench", model, data, "--budget", "25%", "--router", "downsample"))
    assert (report["image_router"], report["image_budget"]) == ("downsample", 0.25)
    assert report["image_tokens_read"] == report["image_tokens"] == 8


def test_speculation_gives_the_same_answers(model: Path, data: Path, tmp_path: Path) -> None:
    for name, flags in (("plain", ()), ("drafts", ("--spec", "ngram"))):
        report_of(run("mmbench", model, data, "--out", tmp_path / name, *flags))
    plain, drafts = (read_results(tmp_path / name) for name in ("plain", "drafts"))
    assert [row["answer"] for row in plain] == [row["answer"] for row in drafts]


def test_vqa_has_the_flags_too(model: Path, tiles: Path, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    row = {"question": "What?", "answer": "cat", "image": tiny_llava.png_text(5), "question_id": 1}
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    flags = ("--config", tiles, "--budget", "1", "--router", "uniform", "--spec", "ngram")
    report = report_of(run("vqa", model, path, *flags))
    assert (report["image_tokens"], report["image_tokens_read"]) == (4, 1)
    assert report["image_router"] == "uniform"


@pytest.mark.parametrize("text", ["x", "-1", "101%", "1.5", "33 percent", ""])
def test_wrong_budgets(text: str) -> None:
    with pytest.raises(ConfigError, match="budget: got"):
        parse_budget(text)


def test_a_share_and_a_number_of_tokens_are_told_apart() -> None:
    assert (parse_budget("1"), parse_budget("1.0"), parse_budget(" 33% ")) == (1, 1.0, 0.33)
    assert isinstance(parse_budget("1"), int)
    made = VisionOptions(budget="64").apply(OvalConfig())
    assert made.vision is not None
    assert (made.vision.budget, made.vision.budget_tokens) == (None, 64)
    over = VisionOptions(budget="50%", clip="some/clip").apply(made)
    assert over.vision is not None
    assert (over.vision.budget, over.vision.budget_tokens, over.vision.clip) == (0.5, None, "some/clip")  # fmt: skip
    assert VisionOptions().apply(OvalConfig()) == OvalConfig()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (VisionOptions(router="random"), "without --budget"),
        (VisionOptions(router="downsample"), "Allowed: a share"),
        (VisionOptions(router="downsample", budget="9"), "Allowed: a share"),
        (VisionOptions(router="downsample", budget="50%", clip="x"), "flags of a router"),
    ],
)
def test_flags_that_do_not_go_together(options: VisionOptions, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        options.apply(OvalConfig())


def test_unknown_routers_are_told(model: Path, data: Path) -> None:
    result = run("mmbench", model, data, "--budget", "1", "--router", "unifrom")
    assert result.exit_code == 2
    assert "uniform" in result.stderr


def test_against_an_earlier_run(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report_of(run("mmbench", model, data, "--out", tmp_path / "a", "--circular"))
    result = run("mmbench", model, data, "--circular", "--against", tmp_path / "a")
    report = report_of(result)
    found = report["against"]
    assert (found["rows"], found["vanilla"]["questions"], found["circular"]["questions"]) == (4, 2, 2)  # fmt: skip
    assert found["vanilla"]["only_first"] == found["vanilla"]["only_second"] == 0
    assert found["vanilla"]["p_value"] == 1.0
    assert found["vanilla"]["first"] == report["vanilla"]
    assert "against a" in result.stderr
    with monkeypatch.context() as patched:
        patched.setattr(mm_run, "collect", _never)
        others = tmp_path / "others.jsonl"
        for changes, word in (({"options": {"A": "y"}}, "other options there"), ({"index": 9}, "no scored question")):  # fmt: skip
            others.write_text(json.dumps({**read_results(tmp_path / "a")[0], **changes}) + "\n", encoding="utf-8")  # fmt: skip
            refused = run("mmbench", model, data, "--circular", "--against", others)
            assert (refused.exit_code, word in refused.stderr) == (2, True), refused.output
    missing = run("mmbench", model, data, "--against", tmp_path / "none.jsonl")
    assert missing.exit_code == 2
    assert "against: cannot read" in missing.stderr


def row(index: int, hit: bool | None, **changes: Any) -> dict[str, Any]:
    values = {"index": index, "group": index % 10**6, "options": {"A": "x"}, "right": "A"}
    return {**values, "hit": hit, **changes}


def test_pairs_are_rows_that_both_runs_scored() -> None:
    step = 10**6
    first = [row(1, True), row(1 + step, True), row(2, True), row(2 + step, False), row(3, None), row(4, True)]  # fmt: skip
    second = [row(1, False), row(1 + step, True), row(2, True), row(2 + step, True), row(3, True)]
    found = compare(first, second)
    assert found["rows"] == 4
    assert {k: found["vanilla"][k] for k in ("both", "only_first", "only_second", "neither")} == {"both": 1, "only_first": 1, "only_second": 0, "neither": 0}  # fmt: skip
    assert (found["circular"]["only_first"], found["circular"]["only_second"]) == (1, 1)
    with pytest.raises(ConfigError, match="other options"):
        compare(first, [row(1, True, options={"A": "y"})])
    with pytest.raises(ConfigError, match="no scored question"):
        compare(first, [row(9, True)])


def test_a_file_that_is_no_result_file(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"index": 1}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="line 1"):
        read_results(path)
    path.write_text("no\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 1"):
        read_results(tmp_path)


def test_the_p_value_is_that_of_all_ways_to_split_the_disagreements() -> None:
    for a, b in itertools.product(range(6), repeat=2):
        found = paired([(True, False)] * a + [(False, True)] * b + [(True, True)] * 3)
        ways = [sum(way) for way in itertools.product((0, 1), repeat=a + b)]
        far = sum(abs(2 * k - (a + b)) >= abs(a - b) for k in ways) / len(ways)
        assert found.p_value == pytest.approx(far)
        assert found.questions == a + b + 3
    assert paired([]).to_dict()["first"] is None
