"""`oval bench fusion`: every order verifies the same drafts, and what is told adds up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import tiny_text
import typer
from transformers import AutoTokenizer
from typer.testing import CliRunner

from oval_adapters.bench.fusion import findings, measure_fusion, num_ticks
from oval_adapters.bench.fusion_values import FusionRow, FusionSettings
from oval_adapters.cli.fusion import fusion_command
from oval_core.errors import ConfigError

SMALL = FusionSettings(
    context=400,
    fast="50%",
    link_gbps=5.0,
    policies=("full", "routed"),
    self_budget=200,
    budget_share=0.3,
    router="sketch",
    depth=3,
    new_tokens=6,
    chunk=200,
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny_models.one_thread()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text.save_checkpoint(tmp_path_factory.mktemp("tiny"), 5)


def test_orders_verify_the_same_drafts_and_give_the_same_tokens(folder: Path) -> None:
    model, ticks = tiny_text.build(folder, 5), []
    tokenizer = AutoTokenizer.from_pretrained(folder)
    orders = ("demand", "none", "recency", "target")
    settings = replace(SMALL, orders=orders)
    found = list(measure_fusion(model, tokenizer, settings, lambda _, n: ticks.append(n)))
    assert sum(ticks) == num_ticks(settings)
    assert [drafts.policy for drafts, _ in found] == ["full", "routed"]
    for drafts, rows in found:
        assert [row.order for row in rows] == list(orders)
        assert not drafts.has_states  # sketches read no hidden states
        for row in rows:
            assert row.identical, row
            assert row.steps == drafts.steps
            assert 0 <= row.resident_share <= 1
            assert 0 < row.hit_rate <= 1
            assert row.bytes_prefetched == row.bytes_used + row.bytes_wasted
            assert (row.predicted > 0) == (row.order in ("recency", "target"))
        by_order = {row.order: row for row in rows}
        # where everything is read, no page is worth moving
        assert (by_order["target"].promoted > 0) == (drafts.policy == "routed")
        assert by_order["target"].resident_share >= by_order["demand"].resident_share


def row(order: str, stall_ms: float, promotion_ms: float) -> FusionRow:
    return FusionRow(
        policy="full", order=order, steps=2, stall_ms=stall_ms, promotion_ms=promotion_ms,
        prepare_ms=0.0, verify_ms=1.0, resident_share=0.2, hit_rate=0.5, predicted=1.0, common=0.0,
        promoted=0.0, bytes_prefetched=0, bytes_used=0, bytes_wasted=0, bytes_late=0,
        bytes_demanded=0, bytes_loaded=0, identical=True,
    )  # fmt: skip


def test_losses_are_told_as_gains_are() -> None:
    told = findings([row("none", 5.0, 0.0), row("union", 4.0, 3.0), row("target", 2.0, 1.0)])
    assert len(told) == 2
    assert "union: waits 2.0 ms a step more than without fusion (7.0 against 5.0" in told[0]
    assert "target: waits 2.0 ms a step less" in told[1]
    assert not findings([row("union", 4.0, 3.0)])


def test_command_ends_with_its_json(folder: Path) -> None:
    app = typer.Typer()
    app.command()(fusion_command)
    arguments = (
        "--context 400 --fast 50% --link-gbps 5 --policy full --order none,union --self-budget 64 "
        "--router sketch --depth 2 --new-tokens 4 --chunk 200 --json"
    )
    result = CliRunner().invoke(app, ["--model", str(folder), *arguments.split()])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    assert [own["order"] for own in told["rows"]] == ["none", "union"]
    assert told["link"] == "modelled link"
    assert told["settings"]["context"] == 400
    assert all(own["identical"] for own in told["rows"])


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("policies", ("half",), "policies: got 'half'"),
        ("orders", ("first",), "orders: got 'first'"),
        ("orders", (), "orders: got none"),
        ("drafter", "ngram", "drafter: got 'ngram'"),
        ("fast", "200%", "fast: got 200%"),
        ("budget_share", 0.0, "budget_share"),
        ("depth", 0, "depth: got 0"),
    ],
)
def test_bad_settings_are_refused(name: str, value: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        FusionSettings(**{name: value})
