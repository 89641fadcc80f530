"""`oval bench router`: counts of operations, times, and its JSON."""

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import tiny_models
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache
from typer.testing import CliRunner, Result

from oval_adapters.bench.recall_selector import SelectorScene
from oval_adapters.bench.router_cost import decoder_flops, measure_router, outline
from oval_adapters.bench.router_cost_values import RouterCostReport, RouterCostSettings
from oval_adapters.cli.app import create_app
from oval_adapters.routing.resolve import model_facts
from oval_core.config import RoutingConfig
from oval_core.routing.checkpoint import TrainedRouter, save_router
from oval_core.routing.output_aware import OutputAwareRouter, RouterConfig
from oval_core.routing.registry import create_router

LAYERS, HEADS, DIM = 5, 4, 12
QUICK = ("--pages", 24, "--rounds", 10, "--layer-groups", 2, "--dtype", "float32")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny_models.one_thread()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_models.build("llama", num_hidden_layers=LAYERS).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A router that reads history and one signal only: few operations, all of them known."""
    path = tmp_path_factory.mktemp("router")
    config = RouterConfig(
        hidden_size=48, num_groups=2, content=False, graph=False, decay=False, signals=("quest",)
    )
    facts = model_facts(tiny_models.build("llama", num_hidden_layers=LAYERS).config)
    save_router(path, TrainedRouter(router=OutputAwareRouter(config), model=facts))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(create_app(), ["bench", "router", *map(str, arguments)])


def test_decoder_flops_are_those_of_one_token() -> None:
    model = tiny_models.build("llama", num_hidden_layers=LAYERS)
    model.set_attn_implementation("eager")
    context = 40
    cache = DynamicCache(config=model.config)
    ids = tiny_models.prompt(context)
    with torch.no_grad():
        model.model(ids[:, :-1], cache=cache, use_cache=True)
        with FlopCounterMode(display=False) as counter:
            model.model(ids[:, -1:], cache=cache, use_cache=True)
    norms = sum(p.numel() for p in model.model.parameters() if p.ndim == 1)
    assert decoder_flops(model, context) - 2 * norms == counter.get_total_flops()
    assert decoder_flops(outline(model.config), context) == decoder_flops(model, context)


def test_router_flops_are_those_of_its_matrices(folder: Path, trained: Path) -> None:
    model = tiny_models.build("llama", num_hidden_layers=LAYERS)
    settings = RouterCostSettings(router=str(trained), pages=24, rounds=10, layer_groups=2)
    report = measure_router("tiny", model.config, settings, torch.float32)
    features = 7 + 1 + 1  # history, signal, lead
    assert report.router_flops == 2 * 2 * 24 * (features * 32 + 32)
    assert report.signal_flops == 2 * (LAYERS - 2) * HEADS * 24 * 2 * DIM
    assert report.decoder_flops == decoder_flops(model, 24 * 16)
    own = report.router_flops + report.signal_flops
    assert report.flops_ratio == pytest.approx(own / report.decoder_flops)
    assert report.is_trained
    assert report.threads == 1


def test_a_scene_has_the_signals_of_a_decode_step() -> None:
    config = tiny_models.build("llama", num_hidden_layers=LAYERS).config
    routing = RoutingConfig(layer_groups=2)
    scene = SelectorScene(config, routing, num_pages=6, page_size=4, needs=frozenset({"quest"}))
    view = scene.view(create_router("quest"))
    assert view.counts.tolist() == [4] * 6
    assert view.length == 24
    assert view.signals["quest"].shape == (2, 6)
    assert view.signals["quest"].exp().sum(-1) == pytest.approx(torch.ones(2).tolist())
    assert torch.equal(scene.score(create_router("quest")), view.signals["quest"])
    # the oracle's truth costs nothing: it is there already
    free = scene.view(create_router("oracle_mass")).signals["oracle_mass"]
    assert free is scene.view(create_router("oracle_mass")).signals["oracle_mass"]


def test_json_is_the_only_line_on_stdout(folder: Path) -> None:
    threads = torch.get_num_threads()
    result = run("--model", folder, *QUICK, "--batch", 2, "--json")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    report = json.loads(line)
    assert set(report) == {field.name for field in fields(RouterCostReport)}
    for part in ("", "signals_", "score_", "choose_"):
        assert 0 < report[f"{part}p50_ms"] <= report[f"{part}p99_ms"]
    assert report["p50_ms"] > report["score_p50_ms"]
    assert (report["is_trained"], report["router"]) == (False, "output_aware")
    assert report["context"] == 24 * 16
    assert "no trained router ships for this model" in result.stderr
    assert torch.get_num_threads() == threads


def test_a_trained_router_and_one_by_name(folder: Path, trained: Path) -> None:
    result = run("--model", folder, *QUICK, "--router", trained)
    assert result.exit_code == 0, result.output
    assert "ratio" in result.stdout
    assert "(trained," in result.stdout.replace("\n", " ")
    result = run("--model", folder, *QUICK, "--router", "persistence", "--json")
    report = json.loads(result.stdout)
    assert (report["router_flops"], report["router_parameters"]) == (0, 0)
    assert not report["is_trained"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--pages", 0), "pages: got 0"),
        (("--batch", 0), "batch: got 0"),
        (("--rounds", 1), "rounds: got 1"),
        (("--router", "persistance"), "did you mean 'persistence'?"),
        (("--router", "/nowhere/router"), "cannot be read"),
        (("--dtype", "bfloat61"), "did you mean 'bfloat16'?"),
        (("--model", "smoll"), "did you mean 'smol'?"),
    ],
)
def test_an_error_is_one_line(folder: Path, arguments: tuple[object, ...], problem: str) -> None:
    result = run("--model", folder, *QUICK, *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert line.startswith("error: ")
    assert problem in line


def test_a_router_of_other_groups_of_layers(folder: Path, trained: Path) -> None:
    result = run("--model", folder, *QUICK, "--router", trained, "--layer-groups", 3)
    assert result.exit_code == 2
    assert "routing.layer_groups: got 3" in result.stderr
