"""`oval bench self-draft`: acceptance is what a plain walk over the text gives, and both policies see the same passages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
import tiny_text
from transformers import AutoTokenizer

from oval_adapters.bench.self_draft import describe, gains, measure_self_draft, num_ticks
from oval_adapters.bench.self_draft_values import SelfDraftRow, SelfDraftSettings
from oval_core.errors import ConfigError

CONTEXT = 160


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny_models.one_thread()


def test_a_budget_of_everything_is_always_right_and_a_small_one_is_not(tmp_path: Path) -> None:
    folder = tiny_text.save_checkpoint(tmp_path / "tiny", 5)
    model, tokenizer = tiny_text.build(folder, 5), AutoTokenizer.from_pretrained(folder)
    settings = SelfDraftSettings(
        data=(str(tiny_text.write_text(tmp_path / "text.txt", 60)),),
        contexts=(CONTEXT,),
        kinds=("text",),
        passages=1,
        budgets=(96, CONTEXT),
        router="sketch",
        depth=3,
        new_tokens=9,
        chunk=64,
    )
    ticks: list[int] = []
    rows = list(measure_self_draft(model, tokenizer, settings, lambda _, n: ticks.append(n)))
    assert sum(ticks) == num_ticks(settings) == 5
    assert len(rows) == 4
    for row in rows:
        assert row.identical, row
        assert row.accepted == round(row.acceptance * row.drafted)
        assert row.acceptance_by_passage == (row.acceptance,)
        assert len(row.accepted_by_position) == 3
        assert row.accepted_by_position[0] >= row.accepted_by_position[-1]
    report = describe("tiny", model, settings, rows)
    assert {gain.budget for gain in report.gains} == {96, CONTEXT}
    assert report.to_dict()["settings"]["contexts"] == (CONTEXT,)


def row(policy: str, kind: str, by_passage: tuple[float, ...]) -> SelfDraftRow:
    mean = sum(by_passage) / len(by_passage)
    return SelfDraftRow(
        context=2048, kind=kind, policy=policy, budget=256, acceptance=mean, tau=1.0,
        accepted_by_position=(mean,), acceptance_by_passage=by_passage, draft_ms=1.0, verify_ms=1.0,
        identical=True, drafted=10, accepted=5,
    )  # fmt: skip


def test_gains_pair_passages_and_weigh_kinds_equally() -> None:
    rows = [
        row("routed", "text", (0.5, 0.7)),
        row("window", "text", (0.4, 0.6)),
        row("routed", "chat", (0.3, 0.3)),
        row("window", "chat", (0.6, 0.6)),
    ]
    (gain,) = gains(rows, seed=0)
    assert gain.gain == pytest.approx(-0.1)
    assert gain.interval == pytest.approx((-0.1, -0.1))
    assert gain.routed_acceptance == pytest.approx(0.45)
    assert not gains(rows[:1], seed=0)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="policies: got 'whole'"):
        SelfDraftSettings(data=("a",), policies=("whole",))
    with pytest.raises(ConfigError, match="budgets: got 5000"):
        SelfDraftSettings(data=("a",), budgets=(5000,))
    with pytest.raises(ConfigError, match="data: got none"):
        SelfDraftSettings(data=())
