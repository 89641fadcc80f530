"""The recall harness: rows are what the core functions say of the same passages, and decoding is the real thing."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import tiny_text
import torch
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from oval_adapters import attach
from oval_adapters.bench import closed_loop_passkeys
from oval_adapters.bench.closed_loop import measure_closed_loop, num_loop_ticks
from oval_adapters.bench.closed_loop_passkeys import make_cases, measure_passkeys
from oval_adapters.bench.recall import held_out_passages, measure_recall, num_ticks, output_errors
from oval_adapters.bench.recall_intervals import interval, mean_of_kinds
from oval_adapters.bench.recall_values import (
    LoopRow,
    PasskeyRow,
    RecallRow,
    RecallSettings,
)
from oval_adapters.routing import RecordOptions, record
from oval_core.config import OvalConfig
from oval_core.routing import recall as judge
from oval_core.routing.recording import Recording
from oval_core.routing.registry import create_router
from oval_core.routing.replay import kept_pages, oracle_selections, replay

ROUTERS = ("persistence", "sketch", "quest", "cross_layer", "h2o")
CONTEXT, STEPS = 300, 10


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
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text.write_text(tmp_path_factory.mktemp("text") / "a.txt", 160)


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
        ("sketch", 1, 0.6, "closed"),
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
    assert interval([[0.0, 1.0], [2.0]], 0) is None
    assert interval([[0.0, 1.0]], 0) == pytest.approx((0.0, 1.0))
    # each kind is drawn by itself: kinds that differ make no interval wide
    assert interval([[0.0, 0.0], [1.0, 1.0]], 0) == pytest.approx((0.5, 0.5))
    many = [float(i % 2) for i in range(400)]
    low, high = interval([many], 0) or (0.0, 0.0)
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
    [("routed", "persistence"), ("routed", "quest"), ("guarded", "sketch")],
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
        ("sketch", "routed", 1),
        ("sketch", "guarded", 1),
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
