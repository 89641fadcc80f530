"""`oval train sizer`: trains what cuts pages under `routing.sizing: dynamic`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oval_adapters.cli.bench_options import AsJson, Dtype, Model, parse_numbers
from oval_adapters.cli.progress import progress_bar
from oval_adapters.training.sizer_settings import SizerTraining

if TYPE_CHECKING:
    from rich.console import Console

    from oval_adapters.training.sizer_run import SizerReport

Data = Annotated[
    list[str],
    typer.Option(help="A file with texts: .txt or .jsonl, also with .gz. May be given several times."),
]  # fmt: skip
Out = Annotated[Path, typer.Option(help="Folder of a trained router of this model; the sizer goes beside it.")]  # fmt: skip
Kinds = Annotated[str, typer.Option(help="Sorts of text, with commas: text, retrieval, chat.")]
Passages = Annotated[int, typer.Option(help="Passages of each kind, a quarter for validation.")]
Context = Annotated[int, typer.Option(help="Tokens of a prompt.")]
Steps = Annotated[int, typer.Option(help="Decode steps of a passage.")]
PageSize = Annotated[int, typer.Option(help="Tokens a page, on average.")]
DenseLayers = Annotated[
    str, typer.Option(help="Layers that read everything, with commas; empty for none.")
]
Updates = Annotated[int, typer.Option(help="Optimiser steps.")]
Seed = Annotated[int, typer.Option(help="Of data and order.")]

_DEFAULTS = SizerTraining(model="smol", data=("-",), out="-")


def register(group: typer.Typer) -> None:
    """Adds the command to the group `train`."""
    group.command("sizer")(sizer_command)


def sizer_command(
    data: Data,
    out: Out,
    model: Model = "smol",
    kinds: Kinds = ",".join(_DEFAULTS.kinds),
    passages: Passages = _DEFAULTS.passages,
    context: Context = _DEFAULTS.context,
    steps: Steps = _DEFAULTS.steps,
    page_size: PageSize = _DEFAULTS.page_size,
    dense_layers: DenseLayers = ",".join(map(str, _DEFAULTS.dense_layers)),
    updates: Updates = _DEFAULTS.updates,
    seed: Seed = _DEFAULTS.seed,
    dtype: Dtype = "bfloat16",
    as_json: AsJson = False,
) -> None:
    """Train a page sizer on the attention that tokens receive, and save it beside a trained router of the same model."""
    from rich.console import Console

    settings = SizerTraining(
        model=model,
        data=tuple(data),
        out=str(out),
        kinds=tuple(kinds.split(",")),
        passages=passages,
        context=context,
        steps=steps,
        page_size=page_size,
        dense_layers=parse_numbers("dense-layers", dense_layers) if dense_layers else (),
        updates=updates,
        seed=seed,
    )
    report = _train(Console(stderr=True), settings, dtype)
    _show(Console(stderr=as_json), report)
    if as_json:
        typer.echo(json.dumps(report.to_dict()))


def _train(console: Console, settings: SizerTraining, dtype: str) -> SizerReport:
    from oval_adapters.load_model import load_config_of, load_model, load_tokenizer
    from oval_adapters.training.sizer_run import check_sizer_training, train_and_save_sizer

    with console.status(f"loading {settings.model}"):
        check_sizer_training(load_config_of(settings.model), settings)
        tokenizer = load_tokenizer(settings.model)
        model = load_model(settings.model, dtype, "cpu")
    recordings = settings.passages * len(settings.kinds)
    with progress_bar(console, recordings + settings.updates) as advance:

        def progress(label: str, done: int, total: int) -> None:
            if advance is not None:
                advance(label, 1)

        return train_and_save_sizer(model, tokenizer, settings, progress)


def _show(console: Console, report: SizerReport) -> None:
    from rich import box
    from rich.table import Table

    title = "variance of log attention within pages, held out"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for name in ("updates", "loss", "sizer", "equal pages", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in report.curve:
        shown = [entry[name] for name in ("loss", "sizer", "fixed")]
        cells = ["" if value is None else f"{value:.4f}" for value in shown]
        table.add_row(str(entry["updates"]), *cells, "kept" if entry is report.best else "")
    console.print(table)
    line = f"sizer saved beside the router in {report.out}"
    console.print(line, style="dim", markup=False, soft_wrap=True)
