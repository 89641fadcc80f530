"""The command `oval`: its subcommands, and how an error leaves the program."""

from __future__ import annotations

import traceback
from importlib import import_module, metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

DISTRIBUTION = "oval-pack"
USER_ERROR_STATUS = 2
INTERRUPTED_STATUS = 130

# Every subcommand module has `register(app)`. At its top it imports typer and the standard library
# only; torch, transformers and rich are imported inside the functions, so that --help is instant.
COMMAND_MODULES = (
    "oval_adapters.cli.demo",
    "oval_adapters.cli.models",
    "oval_adapters.cli.doctor",
    "oval_adapters.cli.generate",
    "oval_adapters.cli.bench",
    "oval_adapters.cli.evaluate",
    "oval_adapters.cli.train",
)


class OvalGroup(TyperGroup):
    """Turns an `OvalError` of any subcommand into one line on stderr and exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the subcommand; errors that a user cannot mend keep their traceback."""
        from oval_core.errors import OvalError

        try:
            return super().invoke(ctx)
        except OvalError as error:
            if ctx.params.get("debug"):
                typer.echo(traceback.format_exc(), err=True, nl=False)
            typer.secho(f"error: {' '.join(str(error).split())}", err=True, fg="red")
            raise typer.Exit(USER_ERROR_STATUS) from error
        except KeyboardInterrupt as error:
            typer.secho("interrupted", err=True, fg="yellow")
            raise typer.Exit(INTERRUPTED_STATUS) from error


def create_app() -> typer.Typer:
    """Returns the command with all subcommands."""
    app = typer.Typer(
        name="oval",
        cls=OvalGroup,
        callback=_root,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="Paged KV cache for Hugging Face models.",
    )
    for name in COMMAND_MODULES:
        import_module(name).register(app)
    return app


def main() -> None:
    """Runs `oval` with the arguments of the process."""
    create_app()(prog_name="oval")


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            version = metadata.version(DISTRIBUTION)
        except metadata.PackageNotFoundError:
            version = f"unknown ({DISTRIBUTION} is not installed; install it with pip)"
        typer.echo(f"oval {version}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", envvar="OVAL_DEBUG", help="Show the traceback of an error."),
    ] = False,
) -> None:
    """Paged KV cache for Hugging Face models."""
    # `version` acts in its callback, `debug` is read from the context by OvalGroup
