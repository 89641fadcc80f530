"""`oval generate` with the flags of policies that select: what it prints, its JSON, and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from typer.testing import CliRunner, Result

from oval_adapters.cli.app import create_app
from oval_core.routing.checkpoint import TrainedRouter, save_router
from oval_core.routing.output_aware import OutputAwareRouter, RouterConfig

_one_thread = pytest.fixture(autouse=True)(tiny_models.one_thread)

TEXT = "ab" * 60
SETTINGS = """
policy: routed
page_size: 4
routing:
  budget_share: 0.2
  window_size: 4
  num_sink_tokens: 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_checkpoint(tmp_path_factory.mktemp("tiny"), None)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "small.yaml"
    path.write_text(SETTINGS, encoding="utf-8")
    return path


def run(folder: Path, *arguments: object) -> Result:
    call = ("--model", folder, "--prompt", TEXT, "--max-new-tokens", 8, "--dtype", "float32")
    words = map(str, ("generate", *call, "--device", "cpu", *arguments))
    return CliRunner().invoke(create_app(), list(words))


def strict(word: str) -> Any:
    raise AssertionError(f"{word} is not JSON")


def as_json(folder: Path, *arguments: object) -> dict[str, Any]:
    result = run(folder, *arguments, "--json")
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout.splitlines()[-1], parse_constant=strict)
    assert row["new_tokens"] == 8
    return row


def test_json_says_what_was_read(folder: Path, config: Path) -> None:
    flags = ("--router", "persistence", "--budget-share", "30%", "--audit-every", 4)
    stats = as_json(folder, "--config", config, *flags)["stats"]
    routing = stats["routing"]
    assert (stats["policy"], stats["page_size"]) == ("routed", 4)
    assert (routing["router"], routing["budget_share"]) == ("persistence", 0.3)
    assert (routing["selections"], routing["dense_forwards"]) == (7, 1)
    assert 0.25 < routing["read_share"] <= 0.3
    assert 0 < routing["mass_recall"] < 1
    assert all(v is None or isinstance(v, str | int | float) for v in routing.values())


def test_nothing_counted_is_null(folder: Path) -> None:
    routing = as_json(folder, "--policy", "routed")["stats"]["routing"]
    assert routing["selections"] == 0
    assert routing["read_share"] is routing["mass_recall"] is routing["budget_share"] is None


def test_guarded_reads_more_for_more_coverage(folder: Path, config: Path) -> None:
    plain = as_json(folder, "--no-oval")
    guarded = ("--config", config, "--policy", "guarded")
    shares = []
    for coverage in (0.3, 0.9, 1.0):
        row = as_json(folder, *guarded, "--coverage", coverage, "--audit-every", 1)
        shares.append(row["stats"]["routing"]["read_share"])
    assert shares[0] < shares[1] < shares[2] == 1.0
    assert row["text"] == plain["text"]
    assert row["stats"]["routing"]["mass_recall"] == 1.0


def test_flags_go_over_the_configuration(folder: Path, config: Path) -> None:
    def routing(*flags: object) -> dict[str, Any]:
        return as_json(folder, "--config", config, *flags)["stats"].get("routing")

    assert 0.15 < routing()["read_share"] <= 0.2
    assert routing("--policy", "full") is None
    tokens = routing("--token-budget", 60)  # in place of the share
    assert (tokens["token_budget"], tokens["budget_share"]) == (60, None)
    assert 0.4 < tokens["read_share"] <= 0.5
    assert routing("--lead", 4)["selections"] == 7


@pytest.mark.parametrize("chunk", [16, 50, 512])
def test_a_prompt_in_pieces_gives_the_same_text(folder: Path, config: Path, chunk: int) -> None:
    flags = ("--config", config, "--router", "sketch", "--prefill-chunk")
    row = as_json(folder, *flags, chunk)
    assert row["stats"]["routing"]["dense_forwards"] == -(-len(TEXT) // chunk)
    assert row["text"] == as_json(folder, *flags, 512)["text"]


def test_tiers_and_a_trained_router(folder: Path, config: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    router = OutputAwareRouter(RouterConfig(hidden_size=48, num_groups=1))
    save_router(tmp_path / "mine", TrainedRouter(router=router))
    flags = ("--config", config, "--router", tmp_path / "mine")
    pages = tmp_path / "pages"
    pages.mkdir()
    tiers = ("--fast-tokens", 100, "--disk", pages)
    row = as_json(folder, *flags, "--prefill-chunk", 16)
    tiered = as_json(folder, *flags, "--prefill-chunk", 16, *tiers)
    assert tiered["text"] == row["text"]
    resident, moving = row["stats"]["routing"], tiered["stats"]["routing"]
    assert moving.pop("summary_tokens") == resident.pop(
        "summary_tokens"
    )  # looking ahead counts once
    assert moving == resident
    assert moving["router"] == "output_aware"
    assert tiered["stats"]["tiers"]["bytes_stored"] > 0
    assert list(pages.iterdir()) == []


def test_the_last_line_says_that_it_is_lossy(folder: Path, config: Path) -> None:
    flags = ("--config", config, "--router", "quest", "--audit-every", 1)
    line = run(folder, *flags).stderr.splitlines()[-1]
    assert "routed by quest, read 19% of the keys (lossy)" in line
    assert "% of the attention mass" in line
    whole = run(folder, "--policy", "guarded").stderr.splitlines()[-1]
    assert "guarded by sketch: everything fitted the budget" in whole


ROUTED = ("--policy", "routed")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--policy", "rooted"), "policy: got 'rooted'; did you mean 'routed'"),
        (("--policy", ""), "policy: got ''"),
        (("--router", "sketch"), "got --router with policy 'full'"),
        (("--policy", "full", "--lead", 2), "got --lead with policy 'full'"),
        ((*ROUTED, "--router", "skecth"), "did you mean 'sketch'? Allowed:"),
        ((*ROUTED, "--router", ""), "routing.router: got ''"),
        ((*ROUTED, "--router", "snapkv"), "no cache knows it while a model decodes"),
        ((*ROUTED, "--router", "."), "oval_config.json cannot be read"),
        ((*ROUTED, "--budget-share", "a fifth"), "budget_share: got 'a fifth'. Allowed: a share"),
        ((*ROUTED, "--budget-share", "nan"), "budget_share: got nan"),
        ((*ROUTED, "--budget-share", "0%"), "budget_share: got 0.0"),
        ((*ROUTED, "--budget-share", "150%"), "budget_share: got 1.5"),
        ((*ROUTED, "--budget-share", "20%", "--token-budget", 9), "Allowed: one of them"),
        ((*ROUTED, "--token-budget", 0), "token_budget: got 0"),
        ((*ROUTED, "--lead", 0), "lead: got 0"),
        ((*ROUTED, "--audit-every", 0), "audit_every: got 0"),
        ((*ROUTED, "--coverage", 0.5), "got --coverage with policy 'routed'"),
        (("--policy", "guarded", "--coverage", 2), "coverage: got 2.0"),
        (("--no-oval", *ROUTED, "--lead", 3), "got it with --policy, --lead"),
    ],
)
def test_an_error_is_one_line(folder: Path, flags: tuple[object, ...], problem: str) -> None:
    result = run(folder, *flags)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert problem in line
    assert "Traceback" not in result.stderr
