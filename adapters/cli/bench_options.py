"""What the subcommands of `oval bench` share: option types, lists with commas, and how one ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

Model = Annotated[str, typer.Option("--model", help="smol, a folder, or a hub id OWNER/NAME.")]
Chunk = Annotated[int, typer.Option(help="Tokens a forward of the prefill.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16, for all sides.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Plot = Annotated[Path | None, typer.Option(help="Also draw to this .png (needs matplotlib).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, last on stdout.")]


def parse_numbers(name: str, text: str) -> tuple[int, ...]:
    """Returns the whole numbers of a list with commas."""
    from oval_core.errors import ConfigError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"{name}: got {text!r}. Allowed: whole numbers with commas, such as 1024,4096. Give these."
        ) from error


def end_bench(console: Console, result: dict[str, Any], *, as_json: bool, whole: bool) -> None:
    """Prints the result last on stdout, if asked for; where rows are missing, exits as a program that got Ctrl-C."""
    if as_json:
        typer.echo(json.dumps(result))
    if not whole:
        end_interrupted(console)


def end_interrupted(console: Console) -> None:
    """Says that rows are missing, and exits as a program that got Ctrl-C."""
    from oval_adapters.cli.app import INTERRUPTED_STATUS

    console.print("interrupted: the rows above are whole, the others are missing", style="yellow")
    raise typer.Exit(INTERRUPTED_STATUS)
