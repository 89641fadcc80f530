"""`oval train clip`: a small CLIP of one's own from captioned pictures, as a model of open_clip."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oval_adapters.cli.bench_options import AsJson
from oval_adapters.cli.progress import step_bar
from oval_adapters.cli.train_llava import Minutes, Out, Pictures, Sources, SplitSeed, Steps
from oval_adapters.training.clip_settings import ClipTraining

if TYPE_CHECKING:
    from rich.console import Console

    from oval_adapters.training.clip_run import ClipReport

ImageSize = Annotated[int, typer.Option(help="Pixels a side of the pictures.")]
Patch = Annotated[int, typer.Option(help="Pixels a side of a patch.")]
Width = Annotated[int, typer.Option(help="Of the image tower.")]
Layers = Annotated[int, typer.Option(help="Of the image tower.")]
TextWidth = Annotated[int, typer.Option(help="Of the text tower.")]
TextLayers = Annotated[int, typer.Option(help="Of the text tower.")]
ContextLength = Annotated[int, typer.Option(help="Tokens of a text.")]
EmbedDim = Annotated[int, typer.Option(help="Of the space that pictures and texts share.")]
BatchSize = Annotated[int, typer.Option("--batch", help="Pictures an update, with their captions.")]
Rate = Annotated[float, typer.Option(help="Learning rate.")]
WeightDecay = Annotated[float, typer.Option(help="Of the towers' matrices.")]
Alike = Annotated[float, typer.Option(help="Share of updates whose pictures have one kind and one ground, so that only things tell them apart.")]  # fmt: skip
Validation = Annotated[int, typer.Option(help="New pictures to judge by, and as many of things never trained on.")]  # fmt: skip
ValidateEvery = Annotated[int, typer.Option(help="Updates from a validation to the next.")]
SaveEvery = Annotated[int, typer.Option(help="Updates from a checkpoint to the next.")]
Seed = Annotated[int, typer.Option(help="Of scenes, captions and weights.")]

_DEFAULTS = ClipTraining(pictures=("-",), out="-", steps=1)


def register(group: typer.Typer) -> None:
    """Adds the command to the group `train`."""
    group.command("clip")(clip_command)


def clip_command(
    pictures: Pictures,
    out: Out,
    steps: Steps = None,
    minutes: Minutes = None,
    image_size: ImageSize = _DEFAULTS.image_size,
    patch: Patch = _DEFAULTS.patch,
    width: Width = _DEFAULTS.width,
    layers: Layers = _DEFAULTS.layers,
    text_width: TextWidth = _DEFAULTS.text_width,
    text_layers: TextLayers = _DEFAULTS.text_layers,
    context_length: ContextLength = _DEFAULTS.context_length,
    embed_dim: EmbedDim = _DEFAULTS.embed_dim,
    batch: BatchSize = _DEFAULTS.batch,
    rate: Rate = _DEFAULTS.rate,
    weight_decay: WeightDecay = _DEFAULTS.weight_decay,
    alike: Alike = _DEFAULTS.alike,
    validation: Validation = _DEFAULTS.validation,
    validate_every: ValidateEvery = _DEFAULTS.validate_every,
    save_every: SaveEvery = _DEFAULTS.save_every,
    seed: Seed = _DEFAULTS.seed,
    split_seed: SplitSeed = _DEFAULTS.split_seed,
    sources: Sources = None,
    as_json: AsJson = False,
) -> None:
    """Train a small CLIP on composed scenes with captions; open_clip loads the folder as local-dir:FOLDER."""
    given: dict[str, Any] = dict(locals())
    values = {own.name: given[own.name] for own in fields(ClipTraining)}
    values |= {"pictures": tuple(pictures), "out": str(out), "sources": tuple(sources or ())}
    _run(ClipTraining(**values), as_json)


def _run(settings: ClipTraining, as_json: bool) -> None:
    from rich.console import Console

    errors = Console(stderr=True)
    report = _train(errors, settings)
    _show(Console(stderr=as_json), report)
    if as_json:
        typer.echo(json.dumps(report.to_dict()))


def _train(console: Console, settings: ClipTraining) -> ClipReport:
    from oval_adapters.training.clip_run import train_and_save_clip

    try:
        with step_bar(console) as tick:
            return train_and_save_clip(settings, tick)
    except KeyboardInterrupt:
        console.print(f"the same command goes on from what lies in {settings.out}", style="yellow", markup=False, soft_wrap=True)  # fmt: skip
        raise


def _show(console: Console, report: ClipReport) -> None:
    from rich import box
    from rich.table import Table

    title = f"new pictures, nearest caption of {report.settings['validation']}, {report.updates} updates"  # fmt: skip
    if report.resumed_at:
        title += f", {report.resumed_at} of them in an earlier run"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for name in ("updates", "minutes", "loss", "scenes %", "naming %", "never seen %", "naming %"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in report.curve:
        loss = "" if entry["loss"] is None else f"{entry['loss']:.3f}"
        cells = (str(entry["updates"]), f"{entry['seconds'] / 60:.1f}", loss)
        parts = [entry[part][sort] for part in ("known", "never_seen") for sort in ("scenes", "naming")]  # fmt: skip
        table.add_row(*cells, *(f"{100 * part['top1']:.1f}" for part in parts))
    console.print(table)
    names = f"{report.known_names} names, {report.never_seen_names} more were held out"
    speed = f", {report.pairs_per_s:.1f} pairs/s" if report.pairs_per_s else ""
    saved = f"saved to {report.out}: {report.parameters / 1e6:.1f} M weights, {report.file_bytes / 1e6:.1f} MB{speed}"  # fmt: skip
    for line in (names, saved, f"settings take it as vision.clip: {report.out}"):  # fmt: skip
        console.print(line, markup=False, highlight=False, soft_wrap=True)
