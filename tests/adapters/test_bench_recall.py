"""`oval bench recall`: rows are what the core functions say of the same passages, and decoding is the real thing."""

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from typer.testing import CliRunner, Result

from oval_adapters import attach
from oval_adapters.bench import closed_loop_passkeys, recall
from oval_adapters.bench.closed_loop import measure_closed_loop, num_loop_ticks
from oval_adapters.bench.closed_loop_passkeys import make_cases, measure_passkeys
from oval_adapters.bench.recall import held_out_passages, measure_recall, num_ticks, output_errors
from oval_adapters.bench.recall_intervals import interval, mean_of_kinds
from oval_adapters.bench.recall_values import (
    LoopRow,
    PasskeyRow,
    RecallRow,
    RecallSettings,
    parse_shares,
)
from oval_adapters.cli.app import create_app
from oval_adapters.routing import RecordOptions, record
from oval_adapters.routing.resolve import model_facts
from oval_core.config import OvalConfig
from oval_core.errors import ConfigError
from oval_core.routing import recall as judge
from oval_core.routing.checkpoint import TrainedRouter, save_router
from oval_core.routing.output_aware import OutputAwareRouter, RouterConfig
from oval_core.routing.recording import Recording
from oval_core.routing.registry import create_router
from oval_core.routing.replay import kept_pages, oracle_selections, replay

ROUTERS = ("persistence", "freekv", "quest", "cross_layer", "h2o")
CONTEXT, STEPS = 300, 10


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny_models.one_thread()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers, three of them routed, and a tokenizer with a token a byte."""
    path = tiny_models.save_checkpoint(tmp_path_factory.mktemp("tiny"), None)
    size = len(AutoTokenizer.from_pretrained(path))
    tiny_models.build("llama", vocab_size=size, num_hidden_layers=5).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    size = len(AutoTokenizer.from_pretrained(folder))
    return tiny_models.build("llama", vocab_size=size, num_hidden_layers=5)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, words = (
        random.Random(0),
        ["old", "river", "ran", "past", "seven", "quiet", "mills", "and", "a", "stone", "bridge"],
    )
    sentences = [" ".join(rng.choices(words, k=9)).capitalize() + "." for _ in range(160)]
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(" ".join(sentences), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def settings(text: Path) -> RecallSettings:
    return RecallSettings(
        data=(str(text),),
        context=CONTEXT,
        steps=STEPS,
        passages=2,
        kinds=("text", "chat"),
        budgets=(0.3, 0.6),
        leads=(1, 4),
        routers=ROUTERS,
        loops=("closed", "open"),
        page_size=8,
        layer_groups=2,
        num_sink_tokens=8,
        window_size=16,
        chunk=128,
        passkey_contexts=(CONTEXT,),
        passkeys=2,
    )


@pytest.fixture(scope="module")
def rows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: RecallSettings
) -> list[RecallRow]:
    ticks: list[int] = []
    found = list(measure_recall(model, tokenizer, settings, lambda _, n: ticks.append(n)))
    assert sum(ticks) == num_ticks(model, settings)
    return found


@pytest.fixture(scope="module")
def recordings(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: RecallSettings
) -> dict[str, list[Recording]]:
    options = RecordOptions(page_size=8, layer_groups=2)
    return {
        kind: [
            record(model, p.prompt_ids, p.continuation_ids, kind=kind, options=options)
            for p in held_out_passages(tokenizer, settings, kind)
        ]
        for kind in settings.kinds
    }


def one(rows: Sequence[Any], **wanted: Any) -> Any:
    (found,) = [r for r in rows if all(getattr(r, name) == v for name, v in wanted.items())]
    return found


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize(
    ("signal", "lead", "budget", "loop"),
    [
        ("persistence", 4, 0.3, "closed"),
        ("persistence", 4, 0.3, "open"),
        ("freekv", 1, 0.6, "closed"),
        ("quest", 0, 0.3, "closed"),
    ],
)
def test_a_row_is_what_the_core_functions_say(
    rows: list[RecallRow],
    recordings: dict[str, list[Recording]],
    settings: RecallSettings,
    signal: str,
    lead: int,
    budget: float,
    loop: str,
) -> None:
    values: dict[str, list[float]] = {}
    options = settings.replay(budget, max(1, lead), loop)
    for recording in recordings["text"]:
        own = replay(recording, create_router(signal), options)
        kept = kept_pages(recording, 8, 16)
        oracle = oracle_selections(recording, settings.replay(budget, 1, "closed"))
        for name, value in {
            "mass_recall": judge.mass_recall(recording, own),
            "mass_recall_p10": judge.mass_recall_p10(recording, own),
            "mass_recall_excluding_kept": judge.mass_recall_excluding_kept(recording, own, kept),
            "page_recall": judge.page_recall(recording, own),
            "heavy_page_recall": judge.heavy_page_recall(recording, own),
            "output_error": judge.output_error(recording, own),
            "miss_bytes_per_token": judge.miss_bytes_per_token(recording, own, oracle),
            "new_bytes_per_token": judge.new_bytes_per_token(recording, own),
        }.items():
            values.setdefault(name, []).append(value)
    row = one(rows, signal=signal, kind="text", lead=lead, budget=budget, loop=loop)
    for name, own_values in values.items():
        assert getattr(row, name) == pytest.approx(mean(own_values), rel=1e-4), name
    assert row.mass_recall_by_passage == pytest.approx(values["mass_recall"])
    assert row.output_error_by_passage == pytest.approx(values["output_error"], rel=1e-4)
    low, high = row.mass_recall_interval
    assert low == pytest.approx(min(values["mass_recall"]))
    assert high == pytest.approx(max(values["mass_recall"]))
    assert row.passages == 2
    assert row.selector_ms > 0


def test_every_case_has_a_row_of_each_kind(rows: list[RecallRow]) -> None:
    late = {"quest", "cross_layer"}
    wanted = {
        (signal, kind, lead, budget, loop)
        for signal in ROUTERS
        for kind in ("text", "chat", "mean")
        for lead in ((0,) if signal in late else (1, 4))
        for budget in (0.3, 0.6)
        for loop in ("closed", "open")
    }
    found = [(r.signal, r.kind, r.lead, r.budget, r.loop) for r in rows]
    assert sorted(found) == sorted(wanted)


def test_the_mean_counts_kinds_equally(rows: list[RecallRow]) -> None:
    case = {"signal": "h2o", "lead": 1, "budget": 0.3, "loop": "closed"}
    text, chat, both = (one(rows, kind=kind, **case) for kind in ("text", "chat", "mean"))
    assert both.mass_recall == pytest.approx((text.mass_recall + chat.mass_recall) / 2)
    assert both.passages == 4
    assert both.mass_recall_by_passage == text.mass_recall_by_passage + chat.mass_recall_by_passage
    assert both.selector_ms == text.selector_ms


def test_output_errors_of_several_selections(recordings: dict[str, list[Recording]]) -> None:
    recording = recordings["text"][0]
    generator = torch.Generator().manual_seed(0)
    selections = [torch.rand(recording.mass.shape, generator=generator) < p for p in (0.2, 0.9)]
    selections.append(torch.ones_like(selections[0]))
    want = [judge.output_error(recording, own) for own in selections]
    assert output_errors(recording, selections) == pytest.approx(want, rel=1e-4, abs=1e-6)


def test_means_leave_nan_out_and_intervals_keep_kinds_apart() -> None:
    assert mean_of_kinds([[1.0, math.nan, 2.0], [5.0]]) == pytest.approx(3.25)
    assert mean_of_kinds([[math.nan], [4.0]]) == 4.0
    assert math.isnan(mean_of_kinds([[math.nan]]))
    assert interval([[0.0, 1.0]], 0) == pytest.approx((0.0, 1.0))
    # each kind is drawn by itself: kinds that differ make no interval wide
    assert interval([[0.0, 0.0], [1.0, 1.0]], 0) == pytest.approx((0.5, 0.5))
    many = [float(i % 2) for i in range(400)]
    low, high = interval([many], 0)
    assert low == pytest.approx(0.5 - 1.96 * 0.5 / 20, abs=0.006)
    assert high == pytest.approx(0.5 + 1.96 * 0.5 / 20, abs=0.006)


@pytest.fixture(scope="module")
def decoded(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: RecallSettings
) -> list[LoopRow]:
    ticks: list[int] = []
    small = replace(settings, budgets=(0.3,))
    found = list(measure_closed_loop(model, tokenizer, small, lambda _, n: ticks.append(n)))
    assert sum(ticks) == num_loop_ticks(model, small)
    return found


def passage_ids(
    tokenizer: PreTrainedTokenizerBase, settings: RecallSettings, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    found = held_out_passages(tokenizer, settings, kind)
    return torch.stack([p.prompt_ids for p in found]), torch.stack([p.continuation_ids for p in found])  # fmt: skip


def losses(model: PreTrainedModel, cache: Any, text: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss [B] of the tokens after the first, one forward each."""
    found = []
    for step in range(text.shape[1] - 1):
        logits = model(text[:, step : step + 1], cache=cache, use_cache=True).logits
        found.append(torch.nn.functional.cross_entropy(logits[:, -1], text[:, step + 1], reduction="none"))  # fmt: skip
    return torch.stack(found).mean(0)


def test_full_attention_has_hugging_faces_perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: RecallSettings,
    decoded: list[LoopRow],
) -> None:
    prompt, text = passage_ids(tokenizer, settings, "chat")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt, cache=cache, use_cache=True)
        want = losses(model, cache, text)
    row = one(decoded, policy="full", kind="chat")
    assert row.log_perplexity_by_passage == pytest.approx(want.tolist(), abs=1e-4)
    assert row.perplexity == pytest.approx(want.mean().exp().item(), rel=1e-4)
    assert (row.perplexity_ratio, row.read_share, row.signal) == (1.0, 1.0, "full")


@pytest.mark.parametrize(
    ("policy", "signal"),
    [("routed", "persistence"), ("routed", "quest"), ("guarded", "freekv")],
)
def test_a_shared_prefill_is_as_good_as_ones_own(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: RecallSettings,
    decoded: list[LoopRow],
    policy: str,
    signal: str,
) -> None:
    prompt, text = passage_ids(tokenizer, settings, "text")
    routing = settings.routing(0.3, 1, signal)
    with torch.no_grad(), attach(model, OvalConfig(policy=policy, page_size=8, routing=routing)) as oval:  # fmt: skip
        cache = oval.new_cache()
        for piece in prompt.tensor_split(3, dim=1):
            model(piece, cache=cache, use_cache=True)
        want = losses(model, cache, text)
        stats = oval.stats()["routing"]
    row = one(decoded, policy=policy, signal=signal, kind="text", budget=0.3)
    assert row.log_perplexity_by_passage == pytest.approx(want.tolist(), abs=1e-4)
    assert row.read_share == pytest.approx(stats["read_share"])
    assert row.summary_share == pytest.approx(stats["summary_tokens"] / stats["tokens_present"])
    full = one(decoded, policy="full", kind="text")
    assert row.perplexity_ratio == pytest.approx(row.perplexity / full.perplexity)
    if policy == "routed":
        assert 0.2 < row.read_share <= 0.31
        assert row.tokens_read_per_step == pytest.approx(0.3 * (CONTEXT + STEPS / 2), abs=9)


def test_routers_that_cannot_decode_are_left_out(decoded: list[LoopRow]) -> None:
    found = {(r.signal, r.policy, r.lead) for r in decoded if r.kind == "mean"}
    assert found == {
        ("full", "full", 0),
        ("persistence", "routed", 1),
        ("freekv", "routed", 1),
        ("freekv", "guarded", 1),
        ("quest", "routed", 0),
        ("h2o", "routed", 1),
    }


def test_answers_are_greedy_and_whole_budgets_are_full_attention(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: RecallSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graded: list[str] = []

    def grade(generated: str, code: str) -> bool:
        graded.append(generated)
        return sum(map(ord, generated)) % 2 == 0

    monkeypatch.setattr(closed_loop_passkeys, "grade", grade)
    whole = replace(settings, budgets=(1.0,), routers=("quest",))
    rows = list(measure_passkeys(model, tokenizer, whole))
    texts: dict[str, list[str]] = {}
    for (flavour, _), cases in make_cases(tokenizer, whole).items():
        for case in cases:
            ids = case.prompt_ids
            ids = torch.cat([ids, case.later_ids()]) if case.later else ids
            done = model.generate(ids[None], max_new_tokens=8, do_sample=False)
            texts.setdefault(flavour, []).append(tokenizer.decode(done[0, len(ids) :], skip_special_tokens=True))  # fmt: skip
    assert sorted(graded) == sorted(2 * [text for own in texts.values() for text in own])
    for flavour, own in texts.items():
        right = sum(sum(map(ord, text)) % 2 == 0 for text in own)
        for signal, policy in (("full", "full"), ("quest", "routed")):
            row: PasskeyRow = one(rows, flavour=flavour, signal=signal, policy=policy)
            assert (row.correct, row.full_correct, row.correct_where_full_is) == (right,) * 3
            assert (row.cases, row.context) == (2, CONTEXT)


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
