"""Groups of options: defaults, what must be given, what a command leaves out; and those of `oval train projector|llava`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from oval_adapters.cli import train_llava
from oval_adapters.cli.app import create_app
from oval_adapters.cli.option_groups import with_options
from oval_adapters.training.llava_settings import LlavaTraining


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    name: Annotated[str, typer.Option(help="Must be given.")]
    size: Annotated[int, typer.Option(help="Has a default.")] = 3
    far: Annotated[str | None, typer.Option(help="May be nothing.")] = None


def invoke(*arguments: str, leave_out: tuple[str, ...] = ()) -> tuple[int, str]:
    app = typer.Typer()

    def command(group: Group, loud: Annotated[bool, typer.Option()] = False) -> None:
        """Says what it got."""
        typer.echo(f"{group.name} {group.size} {group.far} {loud}")

    app.command()(with_options(command, leave_out=leave_out, group=Group))
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output.strip()


def test_fields_are_options_with_their_defaults() -> None:
    assert invoke("--name", "a") == (0, "a 3 None False")
    assert invoke("--loud", "--far", "b", "--size", "7", "--name", "a") == (0, "a 7 b True")


def test_a_field_without_a_default_must_be_given() -> None:
    code, said = invoke("--size", "7")
    assert code == 2
    assert "--name" in said


def test_what_is_left_out_is_no_option_and_has_its_default() -> None:
    out = ("size", "far")
    assert invoke("--name", "a", leave_out=out) == (0, "a 3 None False")
    code, said = invoke("--name", "a", "--size", "7", leave_out=out)
    assert code == 2
    assert "No such option" in said


def test_every_setting_of_a_llava_training_is_an_option_with_the_same_default() -> None:
    mine = {field.name: field.default for field in fields(train_llava.LlavaOptions)}
    for field in fields(LlavaTraining):
        if field.name in ("stage", "pictures", "out"):
            continue
        want = None if field.name == "sources" else field.default
        assert mine[field.name] == want, field.name
    assert mine.keys() - {"as_json"} == {field.name for field in fields(LlavaTraining)} - {"stage"}


@pytest.mark.parametrize(
    "flag", ["--albums", "--album", "--rank", "--lora-rate", "--choice-answer"]
)
def test_the_projector_alone_has_no_options_of_additions(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    monkeypatch.setattr(
        train_llava, "_run", lambda settings, as_json: told.append((settings, as_json))
    )
    common = ["--pictures", "a", "--pictures", "b", "--out", "o", "--steps", "2"]
    values = {"--choice-answer": "text", "--lora-rate": "0.5", "--albums": "0.5"}
    refused = CliRunner().invoke(create_app(), ["train", "projector", *common, flag, "5"])
    assert refused.exit_code == 2
    assert told == []
    given = ["train", "llava", *common, flag, values.get(flag, "5"), "--json"]
    assert CliRunner().invoke(create_app(), given).exit_code == 0
    assert CliRunner().invoke(create_app(), ["train", "projector", *common]).exit_code == 0
    (llava, as_json), (projector, plain) = told
    assert (as_json, plain) == (True, False)
    plain_settings = {"pictures": ("a", "b"), "out": "o", "steps": 2}
    assert projector == LlavaTraining(stage="projector", **plain_settings)
    name = flag[2:].replace("-", "_")
    value = getattr(llava, name)
    assert value != getattr(projector, name)
    assert llava == LlavaTraining(stage="llava", **plain_settings, **{name: value})
