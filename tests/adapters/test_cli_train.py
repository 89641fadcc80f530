"""`oval train router`: what it writes, that it goes on where it was cut off, and its errors."""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import tiny_text
from typer.testing import CliRunner, Result

from oval_adapters.cli.app import create_app
from oval_adapters.cli.train import router_command
from oval_adapters.routing.resolve import model_facts
from oval_adapters.training import train_run
from oval_core.routing.checkpoint import CONFIG_NAME, WEIGHTS_NAME, load_router
from oval_core.routing.output_aware import RouterConfig

CONTEXT, STEPS = 200, 16
CURVE_KEYS = {
    "updates",
    "loss",
    "router_mass_recall",
    "router_missed_output",
    "persistence_mass_recall",
    "persistence_missed_output",
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny_models.one_thread()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, two of them routed."""
    return tiny_text.save_checkpoint(tmp_path_factory.mktemp("tiny"), 4)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text.write_text(tmp_path_factory.mktemp("text") / "a.txt", 60)


@pytest.fixture
def quick(folder: Path, text: Path, tmp_path: Path) -> tuple[object, ...]:
    given = ("--model", folder, "--data", text, "--out", tmp_path / "out", "--dtype", "float32")
    small = ("--context", CONTEXT, "--steps", STEPS, "--passages", 2, "--kinds", "text")
    return (*given, *small, "--updates", 4, "--rounds", 2, "--save-every", 2, "--layer-groups", 2)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(create_app(), ["train", "router", *map(str, arguments)])


def test_trains_saves_and_goes_on(quick: tuple[object, ...], folder: Path, tmp_path: Path) -> None:
    result = run(*quick, "--no-graph", "--no-decay", "--lora-rank", 0, "--json")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    report = json.loads(line)
    out = tmp_path / "out"
    assert (report["out"], report["updates"], report["resumed_at"]) == (str(out), 4, 0)
    assert [entry["updates"] for entry in report["curve"]] == [0, 2, 4]
    assert set(report["curve"][0]) == CURVE_KEYS
    assert report["curve"][0]["loss"] is None
    assert report["best"] in report["curve"]
    best = max(e["router_mass_recall"] - e["router_missed_output"] for e in report["curve"])
    kept = report["best"]
    assert kept["router_mass_recall"] - kept["router_missed_output"] == best
    assert "validation" in result.stderr

    files = {path.name for path in out.iterdir() if path.is_file()} - {"curve.png"}
    assert files == {WEIGHTS_NAME, CONFIG_NAME}
    trained = load_router(out)
    config = trained.router.config
    assert (config.graph, config.decay, config.history, config.lora_rank) == (False, False, True, 0)
    assert (config.num_groups, config.hidden_size) == (2, 48)
    assert trained.model == model_facts(tiny_text.build(folder, 4).config)  # fmt: skip
    written = (out / CONFIG_NAME).read_text(encoding="utf-8")
    assert str(tmp_path) not in written
    assert str(folder.parent) not in written
    assert "NaN" not in written
    assert trained.training["settings"]["data"] == ["a.txt"]
    assert trained.training["curve"] == report["curve"]
    assert set(trained.training) == {"settings", "curve", "versions", "machine"}

    times = {path: path.stat().st_mtime_ns for path in (out / "recordings").iterdir()}
    again = run(*quick, "--no-graph", "--no-decay", "--lora-rank", 0, "--json")
    assert json.loads(again.stdout) == report | {"resumed_at": 4}
    assert times == {path: path.stat().st_mtime_ns for path in (out / "recordings").iterdir()}


def test_the_absolute_head_has_a_number_for_every_page(
    quick: tuple[object, ...], tmp_path: Path
) -> None:
    result = run(*quick, "--head", "absolute", "--page-size", 10, "--updates", 1, "--no-history")
    assert result.exit_code == 0, result.output
    config = load_router(tmp_path / "out").router.config
    assert (config.head, config.num_pages, config.history) == ("absolute", 22, False)
    assert "kept" in result.stdout


def test_ctrl_c_says_how_to_go_on(
    quick: tuple[object, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train_run, "train_router", interrupted)
    result = run(*quick)
    assert result.exit_code == 130
    assert "goes on from what lies in" in result.stderr
    assert len(list((tmp_path / "out" / "recordings").iterdir())) == 2
    assert not (tmp_path / "out" / CONFIG_NAME).exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--label", "weight"), "label: got 'weight'"),
        (("--kinds", "text,retreival"), "did you mean 'retrieval'?"),
        (("--head", "relative"), "head: got 'relative'"),
        (("--lora-rank", -1), "lora_rank: got -1"),
        (("--passages", 1), "passages: got 1"),
        (("--context", 630), "the positions of this model"),
        (("--dense-layers", "0,4"), "dense_layers: got 4"),
        (("--dense-layers", "0,1,2,3"), "so that a layer is left"),
        (("--page-size", 0), "page_size: got 0"),
        (("--data", "none.txt"), "cannot read none.txt"),
        (("--out", "/dev/null/router"), "out: cannot make the folder"),
        (("--model", "smoll"), "did you mean 'smol'?"),
    ],
)
def test_an_error_is_one_line(
    quick: tuple[object, ...], arguments: tuple[object, ...], problem: str
) -> None:
    result = run(*quick, *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert line.startswith("error: ")
    assert problem in line


def test_defaults_are_those_of_the_router() -> None:
    given = {name: p.default for name, p in inspect.signature(router_command).parameters.items()}
    config = RouterConfig(hidden_size=4)
    for name in ("head", "graph", "decay", "history", "content", "lora_rank"):
        assert given[name] == getattr(config, name), name
