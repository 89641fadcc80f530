"""`oval train image-router`: trains what chooses image pages within a budget, for a LLaVA model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oval_adapters.cli.bench_options import AsJson, Device, Dtype, parse_numbers
from oval_adapters.cli.progress import step_bar
from oval_adapters.training.image_router_settings import ImageRouterTraining

if TYPE_CHECKING:
    from rich.console import Console

    from oval_adapters.training.image_router_run import ImageRouterReport

Model = Annotated[str, typer.Option(help="A LLaVA model: a folder, or a hub id OWNER/NAME.")]
Data = Annotated[
    list[str],
    typer.Option(metavar="FILE.tsv", help="Questions in MMBench's form, images inside. May be given several times; judge by others."),
]  # fmt: skip
Out = Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the router; a run that was cut off goes on.")]  # fmt: skip
Recordings = Annotated[
    Path | None, typer.Option(help="Folder of recordings that trainings share; else below --out.")
]
Init = Annotated[str, typer.Option(help="How the router begins: random, key-mean or clip.")]
Clip = Annotated[
    str | None, typer.Option(metavar="MODEL", help="CLIP of --init clip, compared besides: a name, a folder, or open_clip:ARCHITECTURE,WEIGHTS.")
]  # fmt: skip
Questions = Annotated[int, typer.Option(help="Of each file, a seeded draw; 0 for all.")]
Steps = Annotated[int, typer.Option(help="Updates.")]
NumQueries = Annotated[int, typer.Option(help="Last tokens of a question whose attention is learnt.")]  # fmt: skip
Layers = Annotated[
    str | None,
    typer.Option(help="Decoder layers whose attention counts, with commas. Default: all."),
]
Tile = Annotated[int, typer.Option(help="Patches on a side of an image page.")]
Seed = Annotated[int, typer.Option(help="Of draw, split, weights and order.")]

_DEFAULTS = ImageRouterTraining(model="-", data=("-",), out="-")


def register(group: typer.Typer) -> None:
    """Adds the command to the group `train`."""
    group.command("image-router")(image_router_command)


def image_router_command(
    model: Model,
    data: Data,
    out: Out,
    init: Init = _DEFAULTS.init,
    clip: Clip = None,
    questions: Questions = _DEFAULTS.questions,
    steps: Steps = _DEFAULTS.steps,
    num_queries: NumQueries = _DEFAULTS.num_queries,
    layers: Layers = None,
    tile: Tile = _DEFAULTS.tile,
    recordings: Recordings = None,
    seed: Seed = _DEFAULTS.seed,
    dtype: Dtype = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Train a router of image pages on where a LLaVA looks, for `vision.router: FOLDER` and `oval eval mmbench --router FOLDER`."""
    from rich.console import Console

    settings = ImageRouterTraining(
        model=model,
        data=tuple(data),
        out=str(out),
        recordings=None if recordings is None else str(recordings),
        init=init,
        clip=clip,
        questions=questions,
        steps=steps,
        num_queries=num_queries,
        layers=None if layers is None else parse_numbers("layers", layers),
        tile=tile,
        seed=seed,
    )
    report = _train(Console(stderr=True), settings, dtype, device)
    _show(Console(stderr=as_json), report)
    if as_json:
        typer.echo(json.dumps(report.to_dict()))


def _train(
    console: Console, settings: ImageRouterTraining, dtype: str, device: str
) -> ImageRouterReport:
    from oval_adapters.evaluation.mm_model import load_processor
    from oval_adapters.load_model import load_model
    from oval_adapters.training.image_router_run import (
        check_image_router,
        train_and_save_image_router,
    )

    with console.status(f"loading {settings.model}"):
        asks = check_image_router(settings)
        processor = load_processor(settings.model)
        model = load_model(settings.model, dtype, device)
    try:
        with step_bar(console) as tick:
            return train_and_save_image_router(model, processor, settings, asks, tick)
    except KeyboardInterrupt:
        console.print(f"the same command goes on from what lies in {settings.out}", style="yellow", markup=False, soft_wrap=True)  # fmt: skip
        raise


def _show(console: Console, report: ImageRouterReport) -> None:
    from rich import box
    from rich.table import Table

    title = (
        f"attention to image pages that the chosen ones hold, {report.held_out} held-out questions"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    names = [name for name in report.recall[0] if name != "share"]
    for name in ("pages", *names):
        table.add_column(name, justify="right", no_wrap=True)
    for row in report.recall:
        table.add_row(f"{row['share']:.0%}", *(f"{100 * row[name]:.1f}" for name in names))
    console.print(table)
    done = f", {report.resumed_at} of them in an earlier run" if report.resumed_at else ""
    lines = [
        f"{report.questions} questions, {report.image_pages:.0f} image pages each; {report.updates} updates{done}",
        *(f"not asked: {reason}" for reason in report.failed[:5]),
        f"router saved to {report.out}: --router {_as_router(report.out)}",
    ]
    for line in lines:
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


def _as_router(out: str) -> str:
    """Returns the folder as `--router` knows it from a name."""
    return out if "/" in out or out.startswith((".", "~")) else f"./{out}"
