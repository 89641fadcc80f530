"""The flags of speculation: the text stays, what it did is printed, and what is wrong is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from typer.testing import CliRunner, Result

from oval_adapters.cli.app import create_app
from oval_adapters.cli.speculation_options import SpeculationOptions
from oval_core.config import OvalConfig
from oval_core.errors import ConfigError

FAST = ("--dtype", "float32", "--device", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_checkpoint(tmp_path_factory.mktemp("tiny"), None)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(create_app(), ["generate", *map(str, arguments)])


def as_json(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_the_text_stays_and_its_counts_are_shown(folder: Path) -> None:
    call = ("--model", folder, "--prompt", "abab abab", "--max-new-tokens", 24, *FAST)
    plain = as_json(*call)
    assert "speculation" not in plain["stats"]
    fast = as_json(*call, "--spec", "ngram", "--max-nodes", 6)
    assert fast["text"] == plain["text"]
    stats = fast["stats"]["speculation"]
    assert (stats["drafter"], stats["emitted"]) == ("ngram", 23)
    shown = run(*call, "--spec", "draft", "--draft-model", folder, "--depth", 3)
    assert shown.exit_code == 0, shown.output
    assert "tokens a step by draft" in shown.output
    config = folder / "speculate.yaml"
    config.write_text("speculation: {drafter: none}\n")
    assert as_json(*call, "--config", config)["stats"]["speculation"]["tau"] == 1.0


def test_a_text_of_one_token_has_no_step_to_count(folder: Path) -> None:
    call = ("--model", folder, "--prompt", "abab", "--max-new-tokens", 1, *FAST)
    result = run(*call, "--spec", "ngram")
    assert result.exit_code == 0, result.output
    assert "no draft by ngram" in result.stderr
    assert "0.00 tokens a step" not in result.stderr


def test_flags_go_over_a_configuration_field_by_field() -> None:
    before = OvalConfig(speculation={"drafter": "medusa", "depth": 3})
    after = SpeculationOptions(max_nodes=9, typical=True).apply(before).speculation
    assert after is not None
    assert (after.drafter, after.depth, after.max_nodes) == ("medusa", 3, 9)
    assert after.verification == "typical"
    assert SpeculationOptions().apply(before) is before
    assert OvalConfig.from_dict(before.to_dict()) == before


def test_another_drafter_goes_over_a_configuration_with_a_draft_model() -> None:
    before = OvalConfig.from_dict(
        {"speculation": {"drafter": "draft", "draft_model": "some/model"}}
    )
    after = SpeculationOptions(spec="ngram").apply(before).speculation
    assert after is not None
    assert (after.drafter, after.draft_model) == ("ngram", None)
    kept = SpeculationOptions(depth=3).apply(before).speculation
    assert kept is not None
    assert (kept.draft_model, kept.depth) == ("some/model", 3)
    with pytest.raises(ConfigError, match="draft_model"):
        SpeculationOptions(spec="ngram", draft_model="other/model").apply(before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SpeculationOptions(max_nodes=9), "without --spec"),
        (SpeculationOptions(spec="medusas"), "medusa"),
        (SpeculationOptions(spec="draft"), "draft_model"),
        (SpeculationOptions(spec="auto", max_nodes=0), "max_nodes"),
    ],
)
def test_what_is_wrong_is_said(options: SpeculationOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options.apply(OvalConfig())


def test_plain_hugging_face_takes_no_flags_of_oval(folder: Path) -> None:
    result = run("--model", folder, "--prompt", "a", "--no-oval", "--spec", "ngram")
    assert result.exit_code != 0
    assert "--spec" in result.output
