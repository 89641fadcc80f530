"""`oval train sizer`: what is recorded, learnt, written and served; `record_sizes` equals `record`."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
import tiny_text
import torch
import typer
from transformers import PreTrainedModel
from typer.testing import CliRunner, Result

from oval_adapters import attach
from oval_adapters.cli import train_sizer as command
from oval_adapters.cli.app import OvalGroup
from oval_adapters.routing.record_many import TokenRecording, record_sizes, record_tokens
from oval_adapters.routing.recorder import RecordOptions, record
from oval_adapters.routing.resolve import model_facts, resolve_sizer
from oval_adapters.texts import Passage
from oval_adapters.training.sizer_loop import page_variance, train_sizer
from oval_adapters.training.sizer_settings import SizerTraining
from oval_core.config import RoutingConfig
from oval_core.errors import ConfigError
from oval_core.routing.checkpoint import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    TrainedRouter,
    load_router,
    save_router,
)
from oval_core.routing.output_aware import OutputAwareRouter, RouterConfig
from oval_core.routing.page_sizer import DynamicPageSizer

CONTEXT, STEPS = 200, 40
SIZES = ("attention_entropy", "dynamic", "key_similarity")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny_models.one_thread()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_models.build("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def passage() -> Passage:
    ids = torch.randint(4, 160, (CONTEXT + STEPS,), generator=torch.Generator().manual_seed(3))
    return Passage(kind="text", name="a", prompt_ids=ids[:CONTEXT], continuation_ids=ids[CONTEXT:])


def test_one_run_records_what_many_would(model: PreTrainedModel, passage: Passage) -> None:
    options = [
        RecordOptions(page_size=8, layer_groups=2, signals=("sketch",), output_every=9),
        RecordOptions(page_size=16, page_sizes=(3, 30, 1), layer_groups=2, signals=("infllm",)),
    ]
    many = record_sizes(model, passage, options)
    for own, got in zip(options, many, strict=True):
        want = record(
            model, passage.prompt_ids, passage.continuation_ids, kind="text", name="a", options=own
        )
        assert (got.kind, got.name, got.token_bytes) == (want.kind, want.name, want.token_bytes)
        for name in ("counts", "mass", "peak", "effect", "h2o", "part_output", "page_hidden"):
            torch.testing.assert_close(getattr(got, name), getattr(want, name))
        for name, signal in want.signals.items():
            torch.testing.assert_close(got.signals[name], signal)
    assert model.config._attn_implementation == "sdpa"


def test_tokens_are_recorded_as_pages_of_one(model: PreTrainedModel, passage: Passage) -> None:
    own = RecordOptions(page_size=1, layer_groups=1, signals=(), output_every=0)
    want = record(model, passage.prompt_ids, passage.continuation_ids, options=own)
    got = record_tokens(model, passage, own)
    torch.testing.assert_close(got.attention, want.mass[:, 0, :CONTEXT])
    torch.testing.assert_close(got.hidden, want.page_hidden[:CONTEXT], atol=1e-4, rtol=1e-4)


def _planted(seed: int) -> TokenRecording:
    """One feature tells where attention walks from token to token; between, all tokens get the same."""
    generator = torch.Generator().manual_seed(seed)
    moves = (torch.arange(256) // 32 % 2).float()
    hidden = torch.randn(256, 8, generator=generator)
    hidden[:, 0] = moves - 0.5
    walk = (torch.randn(256, generator=generator) * moves).view(-1, 32).cumsum(1).flatten()
    return TokenRecording(hidden, walk.exp().repeat(2, 1))


def test_learns_where_pages_should_be_short() -> None:
    facts = {"page_size": 8, "learning_rate": 0.03, "num_sink_tokens": 0}
    settings = SizerTraining(
        model="-", data=("-",), out="-", updates=40, validate_every=10, **facts
    )
    train, held_out = [_planted(i) for i in range(8)], [_planted(i) for i in range(8, 16)]
    ticks: list[int] = []
    result = train_sizer(train, held_out, settings, lambda label, done, total: ticks.append(done))
    assert ticks == list(range(1, 41))
    assert [entry["updates"] for entry in result.curve] == [0, 10, 20, 30, 40]
    untrained, best = result.curve[0]["sizer"], min(entry["sizer"] for entry in result.curve)
    assert best < 0.85 * result.curve[0]["fixed"]
    assert best < 0.95 * untrained
    assert result.sizer.head.weight[0, 0].item() > 0.1
    kept = [page_variance(result.sizer.sizes(own.hidden), own.attention) for own in held_out]
    assert sum(kept) / 8 == pytest.approx(best), "not the best was kept"
    again = train_sizer(train, held_out, settings, lambda *_: None)
    assert again.curve[1:] == result.curve[1:]


def test_sinks_do_not_count() -> None:
    plain, loud = _planted(0), _planted(0)
    loud.attention[:, :16] = 1e4
    settings = SizerTraining(model="-", data=("-",), out="-", updates=1)
    curves = [
        train_sizer([own], [own], settings, lambda *_: None).curve[1] for own in (plain, loud)
    ]
    assert curves[0] == curves[1]


def test_variance_is_none_in_pages_of_like_tokens() -> None:
    attention = torch.tensor([[1.0, 1.0, 4.0, 4.0], [2.0, 2.0, 1.0, 1.0]])
    assert page_variance([2, 2], attention) == pytest.approx(0.0, abs=1e-6)
    mean = (2 * 0.0 + 8 * torch.tensor(4.0).log()) / 10
    want = (2 * mean**2 + 8 * (torch.tensor(4.0).log() - mean) ** 2) / 10
    assert page_variance([4], attention[:1]) == pytest.approx(float(want), abs=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text.save_checkpoint(tmp_path_factory.mktemp("tiny"), 4)


@pytest.fixture
def router(folder: Path, tmp_path: Path) -> Path:
    """A trained router of the tiny model, as far as anybody can tell."""
    config = tiny_text.build(folder, 4).config
    made = OutputAwareRouter(RouterConfig(hidden_size=config.hidden_size, num_groups=2)).eval()
    trained = TrainedRouter(router=made, model=model_facts(config), training={"seed": 5})
    save_router(tmp_path / "router", trained)
    return tmp_path / "router"


def run(*arguments: object) -> Result:
    app = typer.Typer(cls=OvalGroup, pretty_exceptions_enable=False)
    group = typer.Typer()
    group.callback()(lambda: None)
    command.register(group)
    app.add_typer(group, name="train")
    return CliRunner().invoke(app, ["train", "sizer", *map(str, arguments)])


@pytest.fixture
def quick(folder: Path, router: Path, tmp_path: Path) -> tuple[object, ...]:
    text = tiny_text.write_text(tmp_path / "a.txt", 60)
    given = ("--model", folder, "--data", text, "--out", router, "--dtype", "float32")
    return (*given, "--context", CONTEXT, "--steps", 8, "--passages", 4, "--kinds", "text")


def test_the_sizer_goes_beside_the_router(
    quick: tuple[object, ...], folder: Path, router: Path, tmp_path: Path
) -> None:
    before = load_router(router)
    assert before.sizer is None
    result = run(*quick, "--updates", 30, "--page-size", 8, "--json")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    report = json.loads(line)
    assert report["best"] in report["curve"]
    assert report["curve"][0]["loss"] is None
    assert report["best"]["sizer"] == min(entry["sizer"] for entry in report["curve"])
    after = load_router(router)
    assert after.sizer is not None
    assert after.sizer.mean_size == 8
    assert not after.sizer.training
    for name, weight in before.router.state_dict().items():
        assert torch.equal(weight, after.router.state_dict()[name])
    assert after.training["seed"] == 5
    assert after.training["sizer"]["settings"]["data"] == ["a.txt"]
    assert str(tmp_path) not in (router / CONFIG_NAME).read_text(encoding="utf-8")
    model = tiny_text.build(folder, 4)
    routing = RoutingConfig(router=str(router), sizing="dynamic", layer_groups=2)
    served = resolve_sizer(routing, model, 16)
    assert served is not None
    assert torch.equal(served.head.weight, after.sizer.head.weight)
    assert resolve_sizer(RoutingConfig(router=str(router)), model, 16) is None


def test_a_sizer_comes_back_as_it_was(router: Path) -> None:
    trained, sizer = load_router(router), DynamicPageSizer(48, 12)
    torch.nn.init.normal_(sizer.head.weight)
    save_router(router, TrainedRouter(router=trained.router, model=trained.model, sizer=sizer))
    back = load_router(router)
    hidden = torch.randn(100, 48)
    assert back.sizer is not None
    assert back.sizer.sizes(hidden) == sizer.sizes(hidden)
    values = json.loads((router / CONFIG_NAME).read_text(encoding="utf-8"))
    values["sizer"] = {"width": 3}
    (router / CONFIG_NAME).write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ConfigError, match=CONFIG_NAME):
        load_router(router)
    values["sizer"] = {"hidden_size": 4, "mean_size": 12}
    (router / CONFIG_NAME).write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ConfigError, match=WEIGHTS_NAME):
        load_router(router)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--out", "nowhere"), "oval_config.json cannot be read"),
        (("--kinds", "text,retreival"), "did you mean 'retrieval'?"),
        (("--page-size", 32), "page_size: got 32"),
        (("--context", 100), "context: got 100"),
        (("--context", 640), "the positions of this model"),
        (("--dense-layers", "0,4"), "dense_layers: got 4"),
        (("--updates", 0), "updates: got 0"),
        (("--data", "none.txt"), "cannot read none.txt"),
    ],
)
def test_an_error_is_one_line(
    quick: tuple[object, ...], arguments: tuple[object, ...], problem: str
) -> None:
    result = run(*quick, *arguments)
    assert result.exit_code == 2, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert line.startswith("error: ")
    assert problem in line


def test_a_router_of_another_model_is_refused(quick: tuple[object, ...], router: Path) -> None:
    values = json.loads((router / CONFIG_NAME).read_text(encoding="utf-8"))
    values["model"]["num_layers"] = 30
    (router / CONFIG_NAME).write_text(json.dumps(values), encoding="utf-8")
    result = run(*quick)
    assert result.exit_code == 2
    assert "was trained for" in result.stderr


@pytest.mark.parametrize("sizing", SIZES)
def test_a_model_generates_over_pages_of_any_size(
    model: PreTrainedModel, passage: Passage, sizing: str, caplog: pytest.LogCaptureFixture
) -> None:
    routing = {"sizing": sizing, "router": "ema", "token_budget": 10_000, "max_queries": 8}
    prompt = passage.prompt_ids[None]
    kept = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
    want = model.generate(prompt, **kept).sequences
    caplog.set_level("INFO")
    with attach(model, {"policy": "routed", "page_size": 8, "routing": routing}) as oval:
        cache = oval.new_cache()
        got = model.generate(prompt, cache=cache, **kept).sequences
        sizes = [len(page) for page in cache.paged.table.sequences[0].pages]
    assert torch.equal(got, want), "everything was read"
    assert len(set(sizes)) > (1 if sizing == "dynamic" else 3)  # untrained, it sees no difference
    assert max(sizes) <= 32
    assert 4 < sum(sizes) / len(sizes) < 13
    cache.paged.table.check_integrity()
    said = [record for record in caplog.records if "untrained sizer" in record.message]
    assert len(said) == (sizing == "dynamic")
