"""`oval bench decode`: its JSON, its errors, and what Ctrl-C leaves."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from typer.testing import CliRunner, Result

from oval_adapters.bench import decode
from oval_adapters.cli.app import create_app

QUICK = ("--steps", 2, "--warmup", 0, "--rounds", 1, "--dtype", "float32", "--device", "cpu")
ROW_KEYS = {
    "context",
    "hf_ms_p50",
    "hf_ms_p99",
    "oval_ms_p50",
    "oval_ms_p99",
    "ratio",
    "hf_prefill_s",
    "oval_prefill_s",
    "kv_bytes",
    "oval_kv_bytes_allocated",
    "hf_rss_mb",
    "oval_rss_mb",
    "max_logit_diff",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_models.build("llama").save_pretrained(path)
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(create_app(), ["bench", "decode", *map(str, arguments)])


def test_json_is_the_only_line_on_stdout(folder: Path) -> None:
    result = run("--model", folder, "--context", "16,24", *QUICK, "--json")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    report = json.loads(line)
    assert [row["context"] for row in report["rows"]] == [16, 24]
    assert set(report["rows"][0]) >= ROW_KEYS
    assert (report["steps"], report["rounds"], report["dtype"]) == (2, 1, "float32")
    assert "ratio" in result.stderr  # the table


def test_without_json_a_table(folder: Path) -> None:
    result = run("--model", folder, "--context", "16", *QUICK)
    assert result.exit_code == 0, result.output
    assert "OVAL" in result.stdout
    assert "ratio" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--context", "16,many"), "whole numbers with commas"),
        (("--context", ""), "whole numbers with commas"),
        (("--context", "999"), "the positions of this model"),
        (("--context", "0"), "context: got 0"),
        (("--steps", "0"), "steps: got 0"),
        (("--threads", "0"), "threads: got 0"),
        (("--dtype", "bfloat61"), "did you mean 'bfloat16'?"),
        (("--backend", "torhc"), "did you mean 'torch'?"),
        (("--model", "smoll"), "did you mean 'smol'?"),
        (("--plot", "none/such.png"), "plot: "),
    ],
)
def test_an_error_is_one_line(folder: Path, arguments: tuple[str, ...], problem: str) -> None:
    result = run("--model", folder, "--context", "16", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert line.startswith("error: ")
    assert problem in line


def test_plot_without_matplotlib(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == "matplotlib" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    result = run("--model", folder, "--context", "16", "--plot", "a.png")
    assert result.exit_code == 2
    assert "matplotlib is not installed" in result.stderr


def test_ctrl_c_keeps_the_rows_that_are_done(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = decode.measure_decode

    def interrupted(*arguments: Any) -> Iterator[Any]:
        yield next(measure(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(decode, "measure_decode", interrupted)
    result = run("--model", folder, "--context", "16,24", *QUICK, "--json")
    assert result.exit_code == 130
    assert [row["context"] for row in json.loads(result.stdout)["rows"]] == [16]
    assert "interrupted" in result.stderr
    assert "Traceback" not in result.stderr
