"""`oval train medusa`: trains draft heads on a model's own answers."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oval_adapters.cli.bench_options import AsJson, Model, Plot
from oval_adapters.training.medusa_settings import MedusaTraining
from oval_spec.training.config import HeadTrainingConfig

if TYPE_CHECKING:
    from rich.console import Console

    from oval_adapters.training.medusa_run import MedusaReport

Data = Annotated[
    list[str],
    typer.Option(
        help="Prompts: self (the model writes them), a file (.jsonl with turns, question or prompt; else one a line), or a "
        "folder of answers of an earlier run. May be given several times."
    ),
]
Out = Annotated[Path, typer.Option(help="Folder for the heads; a run that was cut off goes on.")]
Kind = Annotated[
    str, typer.Option(help="sequential: heads see the drafted tokens; or independent.")
]
Heads = Annotated[int, typer.Option(help="Heads, each one token further ahead.")]
Form = Annotated[str, typer.Option(help="Of sequential heads: recurrent or prefix.")]
MlpSize = Annotated[int, typer.Option(help="Of sequential heads.")]
Layers = Annotated[int, typer.Option(help="Layers of a head.")]
Cells = Annotated[int, typer.Option(help="Cells of recurrent heads: 1 shares one.")]
Gated = Annotated[bool, typer.Option(help="Gate the MLPs of sequential heads.")]
SeesHidden = Annotated[bool, typer.Option(help="Recurrent cells see the first hidden state too.")]
Context = Annotated[int, typer.Option(help="Tokens before the root that sequential heads see.")]
Vocabulary = Annotated[int, typer.Option(help="Most frequent tokens that are drafted; 0 for all.")]
Prompts = Annotated[int, typer.Option(help="Prompts that the model writes for --data self.")]
Limit = Annotated[int | None, typer.Option(help="Prompts of each file, from its top.")]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens of an answer, at most.")]
AnswerBatch = Annotated[int, typer.Option(help="Prompts that are answered at once.")]
HeldOut = Annotated[float, typer.Option(help="Share of the prompts to judge by.")]
Layout = Annotated[
    list[str] | None,
    typer.Option(
        "--layout", help="Also write independent heads as C (TGI) or E (vLLM). May be given twice."
    ),
]
Epochs = Annotated[int, typer.Option(help="Times that every position is seen.")]
BatchSize = Annotated[int, typer.Option(help="Positions an update.")]
LearningRate = Annotated[float, typer.Option(help="At its highest.")]
Soft = Annotated[
    int, typer.Option("--soft", help="Likeliest tokens of the model, with their probabilities, to learn; 0: the chosen token alone.")
]  # fmt: skip
Regression = Annotated[float, typer.Option(help="Weight of the distance to the hidden states to come.")]  # fmt: skip
Precision = Annotated[str, typer.Option(help="Of training's matrices: bfloat16 or float32.")]
ValidateEvery = Annotated[int, typer.Option(help="Updates from a validation to the next.")]
SaveEvery = Annotated[int, typer.Option(help="Updates from a checkpoint to the next.")]
Seed = Annotated[int, typer.Option(help="Of weights, order, prompts, and what is held out.")]

_DEFAULTS = MedusaTraining(model="smol", data=("self",), out="-")
_LOOP = HeadTrainingConfig()


def register(group: typer.Typer) -> None:
    """Adds the command to the group `train`."""
    group.command("medusa")(medusa_command)


def medusa_command(
    data: Data,
    out: Out,
    model: Model = "smol",
    kind: Kind = _DEFAULTS.kind,
    heads: Heads = _DEFAULTS.heads,
    form: Form = _DEFAULTS.form,
    mlp_size: MlpSize = _DEFAULTS.mlp_size,
    layers: Layers = _DEFAULTS.layers,
    cells: Cells = _DEFAULTS.cells,
    gated: Gated = _DEFAULTS.gated,
    sees_hidden: SeesHidden = _DEFAULTS.sees_hidden,
    context: Context = _DEFAULTS.context,
    vocabulary: Vocabulary = _DEFAULTS.vocabulary,
    prompts: Prompts = _DEFAULTS.prompts,
    limit: Limit = _DEFAULTS.limit,
    max_new_tokens: MaxNewTokens = _DEFAULTS.max_new_tokens,
    answer_batch: AnswerBatch = _DEFAULTS.answer_batch,
    held_out: HeldOut = _DEFAULTS.held_out,
    layouts: Layout = None,
    epochs: Epochs = _LOOP.epochs,
    batch_size: BatchSize = _LOOP.batch_size,
    learning_rate: LearningRate = _LOOP.learning_rate,
    soft_tokens: Soft = _LOOP.soft_tokens,
    regression: Regression = _LOOP.regression,
    precision: Precision = _LOOP.precision,
    validate_every: ValidateEvery = _LOOP.validate_every,
    save_every: SaveEvery = _LOOP.save_every,
    seed: Seed = _LOOP.seed,
    dtype: Annotated[
        str, typer.Option(help="Of the model while it answers: float32, bfloat16 or float16.")
    ] = "bfloat16",
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Train draft heads for speculative decoding on the model's own greedy answers; they are saved as oval_heads.safetensors."""
    _run(_settings(dict(locals())), dtype, plot, as_json)


def _settings(given: dict[str, Any]) -> MedusaTraining:
    """Returns the settings of options that are named as the fields they set."""
    loop = {own.name: given[own.name] for own in fields(HeadTrainingConfig) if own.name in given}
    rest = {own.name: given[own.name] for own in fields(MedusaTraining) if own.name in given}
    rest |= {"data": tuple(given["data"]), "out": str(given["out"])}
    rest["layouts"] = tuple(given["layouts"] or ())
    return MedusaTraining(**rest, loop=HeadTrainingConfig(**loop))


def _run(settings: MedusaTraining, dtype: str, plot: Path | None, as_json: bool) -> None:
    from rich.console import Console

    errors = Console(stderr=True)
    if plot is not None:
        from oval_adapters.bench.plot import check_plot

        check_plot(plot)
    report = _train(errors, settings, dtype)
    _show(Console(stderr=as_json), report)
    if plot is not None:
        from oval_adapters.training.medusa_plot import draw_head_curve

        draw_head_curve(report.curve, plot)
        errors.print(f"curve drawn to {plot}", style="dim", markup=False, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(report.to_dict()))


def _train(console: Console, settings: MedusaTraining, dtype: str) -> MedusaReport:
    from oval_adapters.cli.progress import step_bar
    from oval_adapters.load_model import load_config_of, load_model, load_tokenizer
    from oval_adapters.training.medusa_run import check_medusa_training, train_and_save_medusa

    with console.status(f"loading {settings.model}"):
        tokenizer = load_tokenizer(settings.model)
        check_medusa_training(load_config_of(settings.model), tokenizer, settings)
        model = load_model(settings.model, dtype, "cpu")
    try:
        with step_bar(console) as tick:
            return train_and_save_medusa(model, tokenizer, settings, tick)
    except KeyboardInterrupt:
        console.print(f"the same command goes on from what lies in {settings.out}", style="yellow", markup=False, soft_wrap=True)  # fmt: skip
        raise


def _show(console: Console, report: MedusaReport) -> None:
    from rich import box
    from rich.table import Table

    title = f"{report.kind} heads, held out ({report.held_out_positions} positions), {report.updates} updates"
    if report.resumed_at:
        title += f", {report.resumed_at} of them in an earlier run"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for name in ("updates", "loss", "top-1 % by head", "top-5 %", "tau, 31 nodes"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in report.curve:
        table.add_row(
            str(entry["updates"]),
            f"{entry['loss']:.3f}",
            " ".join(f"{100 * value:.1f}" for value in entry["top1"]),
            " ".join(f"{100 * value:.0f}" for value in entry["top5"]),
            f"{entry['tau']['31']:.3f}",
        )
    console.print(table)
    for line in _facts(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _facts(report: MedusaReport) -> list[str]:
    tau = ", ".join(f"{kind} {value:.2f}" for kind, value in report.tau_by_kind.items())
    sizes = ", ".join(f"{n}: {value:.2f}" for n, value in report.curve[-1]["tau"].items())
    lines = [f"tau by drafted nodes of the best fixed tree: {sizes}"]
    lines.append(f"tau with trees of 32 nodes that grow by probability: {tau}")
    vocabulary = f"draft vocabulary: {report.draft_tokens} tokens, {100 * report.coverage:.1f} % of held-out ones"
    if report.unseen_draft_tokens:
        vocabulary += f"; {report.unseen_draft_tokens} were in no text: the lowest ids fill up"
    lines.append(vocabulary)
    if report.too_long:
        lines.append(f"{report.too_long} prompts were left out: the model has too few positions")
    speed = f", {report.positions_per_s:.0f} positions/s" if report.positions_per_s else ""
    lines.append(f"saved to {report.out}: {report.file_bytes / 1e6:.1f} MB{speed}")
    return lines + [f"layout {name} in {folder}" for name, folder in report.layouts.items()]
