"""Budgets of image tokens, speculation, and a comparison with an earlier run, in `oval eval mmbench` and `vqa`."""

from __future__ import annotations

import base64
import csv
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_llava
import tiny_models
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from oval_adapters.cli.app import create_app
from oval_adapters.cli.vision_options import VisionOptions, parse_budget
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


def image(seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (16, 16, 3), generator=generator, dtype=torch.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "tiny.tsv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, delimiter="\t", lineterminator="\n")
        writer.writeheader()
        for index in (1, 2):
            cells = {"A": "cat", "B": "dog", "answer": "A", "category": "x", "image": image(index)}
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
    row = {"question": "What?", "answer": "cat", "image": image(5), "question_id": 1}
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


def test_against_an_earlier_run(model: Path, data: Path, tmp_path: Path) -> None:
    report_of(run("mmbench", model, data, "--out", tmp_path / "a", "--circular"))
    result = run("mmbench", model, data, "--circular", "--against", tmp_path / "a")
    report = report_of(result)
    found = report["against"]
    assert (found["rows"], found["vanilla"]["questions"], found["circular"]["questions"]) == (4, 2, 2)  # fmt: skip
    assert found["vanilla"]["only_first"] == found["vanilla"]["only_second"] == 0
    assert found["vanilla"]["p_value"] == 1.0
    assert found["vanilla"]["first"] == report["vanilla"]
    assert "against a" in result.stderr
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
