"""`oval train`: trains what OVAL adds to a model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oval_adapters.cli import train_clip, train_image_router, train_llava, train_medusa, train_sizer
from oval_adapters.cli.bench_options import AsJson, Dtype, Model, parse_numbers
from oval_adapters.cli.progress import step_bar
from oval_adapters.training.router_settings import RouterTraining

if TYPE_CHECKING:
    from rich.console import Console

    from oval_adapters.training.train_run import TrainReport

Data = Annotated[
    list[str],
    typer.Option(help="A file with texts: .txt or .jsonl, also with .gz. May be given several times."),
]  # fmt: skip
Out = Annotated[Path, typer.Option(help="Folder for the router; a run that was cut off goes on.")]
Label = Annotated[str, typer.Option(help="What is predicted: mass, output-error or both.")]
Kinds = Annotated[str, typer.Option(help="Sorts of text, with commas: text, retrieval, chat.")]
Passages = Annotated[int, typer.Option(help="Passages of each kind, a tenth for validation.")]
Context = Annotated[int, typer.Option(help="Tokens of a prompt.")]
Steps = Annotated[int, typer.Option(help="Decode steps of a passage.")]
Updates = Annotated[int, typer.Option(help="Optimiser steps.")]
Rounds = Annotated[int, typer.Option(help="Times that histories are made anew with the router as it is.")]  # fmt: skip
SaveEvery = Annotated[int, typer.Option(help="Updates from a checkpoint to the next.")]
LayerGroups = Annotated[int, typer.Option(help="Selections a forward; neighbours share one.")]
DenseLayers = Annotated[
    str, typer.Option(help="Layers that read everything, with commas; empty for none.")
]
PageSize = Annotated[int, typer.Option(help="Tokens a page.")]
Head = Annotated[str, typer.Option(help="content, or absolute: one logit a page number.")]
Graph = Annotated[bool, typer.Option(help="Use co-occurrence of pages.")]
Decay = Annotated[bool, typer.Option(help="Use distance.")]
History = Annotated[bool, typer.Option(help="Use the mass that pages got before.")]
Content = Annotated[bool, typer.Option(help="Use the last hidden state.")]
LoraRank = Annotated[int, typer.Option(help="Rank of the second layer; 0 trains all of it.")]
Gamma = Annotated[float, typer.Option(help="Of the focal loss; 0 is cross-entropy.")]
Seed = Annotated[int, typer.Option(help="Of weights and draws, and of what is held out.")]
DataSeed = Annotated[int, typer.Option(help="Of the passages.")]
Recordings = Annotated[
    Path | None, typer.Option(help="Folder of recordings that trainings share; else below --out.")
]

Progress = Callable[[str, int, int], None]

_DEFAULTS = RouterTraining(model="smol", data=("-",), out="-")


def register(app: typer.Typer) -> None:
    """Adds the group `train`."""
    group = typer.Typer(
        no_args_is_help=True,
        help="Train routers and draft heads for a model, a small LLaVA or CLIP.",
    )
    group.command("router")(router_command)
    train_sizer.register(group)
    train_medusa.register(group)
    train_llava.register(group)
    train_image_router.register(group)
    train_clip.register(group)
    app.add_typer(group, name="train")


def router_command(
    data: Data,
    out: Out,
    model: Model = "smol",
    label: Label = _DEFAULTS.label,
    kinds: Kinds = ",".join(_DEFAULTS.kinds),
    passages: Passages = _DEFAULTS.passages,
    context: Context = _DEFAULTS.context,
    steps: Steps = _DEFAULTS.steps,
    updates: Updates = _DEFAULTS.updates,
    rounds: Rounds = _DEFAULTS.rounds,
    save_every: SaveEvery = _DEFAULTS.save_every,
    layer_groups: LayerGroups = _DEFAULTS.layer_groups,
    dense_layers: DenseLayers = ",".join(map(str, _DEFAULTS.dense_layers)),
    page_size: PageSize = _DEFAULTS.page_size,
    head: Head = "content",
    graph: Graph = True,
    decay: Decay = True,
    history: History = True,
    content: Content = True,
    lora_rank: LoraRank = 4,
    gamma: Gamma = _DEFAULTS.gamma,
    seed: Seed = _DEFAULTS.seed,
    data_seed: DataSeed = _DEFAULTS.data_seed,
    recordings: Recordings = None,
    dtype: Dtype = "bfloat16",
    as_json: AsJson = False,
) -> None:
    """Train a router on the attention of a model over texts; it is saved as oval_adapter.safetensors and oval_config.json."""
    router: dict[str, Any] = {"head": head, "graph": graph, "decay": decay, "history": history}
    router |= {"content": content, "lora_rank": lora_rank}
    if head == "absolute":
        router["num_pages"] = math.ceil((context + steps) / max(1, page_size))
    settings = RouterTraining(
        model=model,
        data=tuple(data),
        out=str(out),
        kinds=tuple(kinds.split(",")),
        passages=passages,
        context=context,
        steps=steps,
        label=label,
        rounds=rounds,
        updates=updates,
        gamma=gamma,
        seed=seed,
        data_seed=data_seed,
        recordings=None if recordings is None else str(recordings),
        layer_groups=layer_groups,
        dense_layers=parse_numbers("dense-layers", dense_layers) if dense_layers else (),
        page_size=page_size,
        router=router,
        save_every=save_every,
    )
    _run(settings, dtype, as_json)


def _run(settings: RouterTraining, dtype: str, as_json: bool) -> None:
    from rich.console import Console

    errors = Console(stderr=True)
    report = _train(errors, settings, dtype)
    _show(Console(stderr=as_json), report)
    _draw(errors, report)
    if as_json:
        typer.echo(json.dumps(report.to_dict()))


def _train(console: Console, settings: RouterTraining, dtype: str) -> TrainReport:
    from oval_adapters.load_model import load_config_of, load_model, load_tokenizer
    from oval_adapters.training.train_run import check_training, train_and_save

    with console.status(f"loading {settings.model}"):
        check_training(load_config_of(settings.model), settings)
        tokenizer = load_tokenizer(settings.model)
        model = load_model(settings.model, dtype, "cpu")
    try:
        with step_bar(console) as progress:
            return train_and_save(model, tokenizer, settings, progress)
    except KeyboardInterrupt:
        console.print(f"the same command goes on from what lies in {settings.out}", style="yellow", markup=False, soft_wrap=True)  # fmt: skip
        raise


def _show(console: Console, report: TrainReport) -> None:
    from rich import box
    from rich.table import Table

    title = f"validation, budget 10 %, {report.updates} updates"
    if report.resumed_at:
        title += f", {report.resumed_at} of them in an earlier run"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for name in ("updates", "loss", "recall %", "persistence", "missed output", "persistence", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in report.curve:
        loss = entry["loss"]
        shares = [entry[f"{who}_mass_recall"] for who in ("router", "persistence")]
        missed = [entry[f"{who}_missed_output"] for who in ("router", "persistence")]
        table.add_row(
            str(entry["updates"]),
            "" if loss is None else f"{loss:.4f}",
            *(f"{100 * (value or 0.0):.2f}" for value in shares),
            *(f"{value:.4f}" for value in missed),
            "kept" if entry == report.best else "",
        )
    console.print(table)


def _draw(console: Console, report: TrainReport) -> None:
    from oval_adapters.training.train_run import draw_curve

    path = draw_curve(report.curve, Path(report.out))
    drawn = "no curve is drawn: matplotlib is not installed" if path is None else f"curve drawn to {path}"  # fmt: skip
    for line in (f"router saved to {report.out}", drawn):
        console.print(line, style="dim", markup=False, soft_wrap=True)
