"""`oval bench recall`: its JSON, its errors, its plots, and what Ctrl-C leaves."""

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import tiny_text
import torch
from transformers import PreTrainedModel
from typer.testing import CliRunner, Result

from oval_adapters.bench import recall
from oval_adapters.bench.recall_routers import check_routers, contenders
from oval_adapters.bench.recall_values import (
    LoopRow,
    PasskeyRow,
    RecallRow,
    RecallSettings,
    parse_shares,
)
from oval_adapters.cli.app import create_app
from oval_adapters.routing.resolve import model_facts
from oval_core.errors import ConfigError
from oval_core.routing.checkpoint import TrainedRouter, save_router
from oval_core.routing.output_aware import OutputAwareRouter, RouterConfig

CONTEXT = 300


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny_models.one_thread()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers, three of them routed."""
    return tiny_text.save_checkpoint(tmp_path_factory.mktemp("tiny"), 5)


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return tiny_text.build(folder, 5)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text.write_text(tmp_path_factory.mktemp("text") / "a.txt", 160)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(create_app(), ["bench", "recall", *map(str, arguments)])


@pytest.fixture
def quick(folder: Path, text: Path) -> tuple[object, ...]:
    small = ("--steps", 4, "--passages", 1, "--kinds", "text", "--budgets", "40%", "--lead", 1)
    pages = ("--page-size", 8, "--window", 16, "--sinks", 8, "--layer-groups", 2)
    passkeys = ("--passkeys", 1, "--passkey-context", CONTEXT)
    given = ("--model", folder, "--data", text, "--context", CONTEXT, "--dtype", "float32")
    return (*given, *small, *pages, *passkeys)


def test_json_is_the_only_line_on_stdout(
    quick: tuple[object, ...], folder: Path, tmp_path: Path, model: PreTrainedModel
) -> None:
    trained = OutputAwareRouter(RouterConfig(hidden_size=48, num_groups=2))
    save_router(tmp_path / "mine", TrainedRouter(router=trained, model=model_facts(model.config)))
    result = run(*quick, "--routers", f"persistence,{tmp_path / 'mine'}", "--json")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    report = json.loads(line)
    assert [row["signal"] for row in report["rows"]] == ["persistence", "mine"]
    assert set(report["rows"][0]) == {field.name for field in fields(RecallRow)}
    decoded = [(row["signal"], row["policy"]) for row in report["decode"]]
    ours = [("persistence", "routed"), ("mine", "routed"), ("mine", "guarded")]
    assert decoded == [("full", "full"), *ours]
    assert set(report["decode"][0]) == {field.name for field in fields(LoopRow)}
    flavours = {row["flavour"] for row in report["passkeys"]}
    assert (len(report["passkeys"]), flavours) == (8, {"single", "later"})
    assert set(report["passkeys"][0]) == {field.name for field in fields(PasskeyRow)}
    assert report["settings"]["budgets"] == [0.4]
    assert torch.__version__.startswith(report["versions"]["torch"])
    for title in ("text, lead 1, budget 40.0%", "text, decoded", "passkeys, later"):
        assert title in result.stderr


def test_without_decoding_and_with_every_name(quick: tuple[object, ...]) -> None:
    result = run(*quick, "--no-decode", "--routers", "all", "--loop", "both", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["decode"], report["passkeys"]) == ([], [])
    by_loop = {loop: {r["signal"]: r for r in report["rows"] if r["loop"] == loop} for loop in ("closed", "open")}  # fmt: skip
    assert set(by_loop["closed"]) == set(by_loop["open"]) >= {"oracle_mass", "random", "infllm"}
    best = max(by_loop["open"].values(), key=lambda row: row["mass_recall"])
    assert best["signal"] == "oracle_mass"
    assert best["miss_bytes_per_token"] == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--budgets", "0%"), "budgets: got '0%'"),
        (("--budgets", "10%,some"), "budgets: got 'some'"),
        (("--budgets", "120%"), "budgets: got '120%'"),
        (("--routers", "persistance"), "did you mean 'persistence'?"),
        (("--routers", "/nowhere/router"), "router /nowhere/router: oval_config.json cannot be"),
        (("--kinds", "text,retreival"), "did you mean 'retrieval'?"),
        (("--loop", "opne"), "did you mean 'open'?"),
        (("--lead", "0"), "lead: got 0"),
        (("--lead", "5"), "lead: got 5"),
        (("--steps", "1"), "steps: got 1"),
        (("--passages", "0"), "passages: got 0"),
        (("--context", "700"), "the positions of this model"),
        (("--passkey-context", "600"), "passkey-context: got 600"),
        (("--passkey-context", "50"), "too small for 2 codes"),
        (("--dense-layers", "0,5"), "dense_layers: got 5"),
        (("--data", "b.txt"), "passages: got 1 of each kind for 2 files"),
        (("--model", "smoll"), "did you mean 'smol'?"),
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


@pytest.mark.parametrize("name", ["short.txt", "none.txt"])
def test_a_file_that_is_too_short_or_not_there(
    quick: tuple[object, ...], tmp_path: Path, name: str
) -> None:
    (tmp_path / "short.txt").write_text("Only a few words are here.", encoding="utf-8")
    result = run(*[tmp_path / name if str(a).endswith("a.txt") else a for a in quick])
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert name in line


def test_a_router_of_other_groups_of_layers(
    quick: tuple[object, ...], tmp_path: Path, model: PreTrainedModel
) -> None:
    trained = OutputAwareRouter(RouterConfig(hidden_size=48, num_groups=3))
    save_router(tmp_path, TrainedRouter(router=trained, model=model_facts(model.config)))
    result = run(*quick, "--routers", tmp_path)
    assert result.exit_code == 2
    assert "routing.layer_groups: got 2" in result.stderr


def test_auto_is_what_routing_takes(model: PreTrainedModel) -> None:
    settings = RecallSettings(data=("a.txt",), routers=("auto", "quest"))
    check_routers(settings)
    assert [own.signal for own in contenders(settings, model)] == ["sketch", "quest"]


def test_ctrl_c_keeps_the_rows_that_are_done(
    quick: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = recall.measure_recall

    def interrupted(*arguments: Any) -> Iterator[Any]:
        yield next(measure(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(recall, "measure_recall", interrupted)
    result = run(*quick, "--routers", "ema,h2o", "--json")
    assert result.exit_code == 130
    assert [row["signal"] for row in json.loads(result.stdout)["rows"]] == ["ema"]
    assert "interrupted" in result.stderr
    assert "Traceback" not in result.stderr


def test_plots(quick: tuple[object, ...], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run(*quick, "--routers", "ema,quest", "--passkeys", 0, "--plot", tmp_path / "new")
    assert result.exit_code == 0, result.output
    names = {"mass_recall.png", "output_error.png", "perplexity.png"}
    assert {path.name for path in (tmp_path / "new").iterdir()} == names


def test_shares() -> None:
    assert parse_shares("budgets", "5%,0.5,100%") == (0.05, 0.5, 1.0)
    with pytest.raises(ConfigError, match="budgets: got '-5%'"):
        parse_shares("budgets", "10%,-5%")
