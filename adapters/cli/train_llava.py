"""`oval train projector` and `oval train llava`: a small LLaVA from a decoder, a vision tower and captioned pictures."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oval_adapters.cli.bench_options import AsJson
from oval_adapters.cli.option_groups import with_options
from oval_adapters.cli.progress import step_bar
from oval_adapters.training.llava_settings import LlavaTraining

if TYPE_CHECKING:
    from rich.console import Console

    from oval_adapters.training.llava_run import LlavaReport

Pictures = Annotated[
    list[str],
    typer.Option(help="Folder with NAME.png beside NAME.txt, a short caption, at any depth. May be given several times."),
]  # fmt: skip
Out = Annotated[Path, typer.Option(help="Folder for the weights; a run that was cut off goes on.")]
Model = Annotated[str, typer.Option(help="The decoder: smol, or a folder.")]
Vision = Annotated[str, typer.Option(help="The tower: dinov2-small, or a folder.")]
Steps = Annotated[int | None, typer.Option(help="Updates; or give --minutes.")]
Minutes = Annotated[float | None, typer.Option(help="Time of all runs together; or give --steps.")]
Init = Annotated[Path | None, typer.Option(help="Weights to go on from, of an earlier training.")]
AlignPictures = Annotated[int, typer.Option(help="Pictures that the projector is aligned on with words; 0 for none.")]  # fmt: skip
AlignUpdates = Annotated[int, typer.Option(help="Updates of that.")]
Scenes = Annotated[int, typer.Option(help="Different pictures that are composed.")]
BatchSize = Annotated[int, typer.Option("--batch", help="Pictures an update.")]
Questions = Annotated[int, typer.Option(help="Questions a picture.")]
Albums = Annotated[float, typer.Option(help="Share of updates, in the second half, about many pictures at once.")]  # fmt: skip
Album = Annotated[int, typer.Option(help="Pictures of an album.")]
Rank = Annotated[int, typer.Option(help="Of the decoder's additions.")]
LoraRate = Annotated[float, typer.Option(help="Learning rate of the additions.")]
ProjectorRate = Annotated[float, typer.Option(help="Learning rate of the projector.")]
ChoiceAnswer = Annotated[
    str, typer.Option(help="What the model learns to say where a letter is asked for: letter, or text of the option.")
]  # fmt: skip
Validation = Annotated[int, typer.Option(help="Questions of each sort to judge by.")]
ValidateEvery = Annotated[int, typer.Option(help="Updates from a validation to the next.")]
SaveEvery = Annotated[int, typer.Option(help="Updates from a checkpoint to the next.")]
Seed = Annotated[int, typer.Option(help="Of scenes, questions and weights.")]
SplitSeed = Annotated[int, typer.Option(help="Of which things are never trained on.")]
Sources = Annotated[
    list[str] | None,
    typer.Option("--source", help="Where pictures are from, with their licence, for the record. May be given several times."),
]  # fmt: skip

_DEFAULTS = LlavaTraining(stage="llava", pictures=("-",), out="-", steps=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LlavaOptions:
    """What the user typed."""

    pictures: Pictures
    out: Out
    model: Model = _DEFAULTS.model
    vision: Vision = _DEFAULTS.vision
    steps: Steps = None
    minutes: Minutes = None
    init: Init = None
    align_pictures: AlignPictures = _DEFAULTS.align_pictures
    align_updates: AlignUpdates = _DEFAULTS.align_updates
    scenes: Scenes = _DEFAULTS.scenes
    batch: BatchSize = _DEFAULTS.batch
    questions: Questions = _DEFAULTS.questions
    albums: Albums = _DEFAULTS.albums
    album: Album = _DEFAULTS.album
    rank: Rank = _DEFAULTS.rank
    lora_rate: LoraRate = _DEFAULTS.lora_rate
    projector_rate: ProjectorRate = _DEFAULTS.projector_rate
    choice_answer: ChoiceAnswer = _DEFAULTS.choice_answer
    validation: Validation = _DEFAULTS.validation
    validate_every: ValidateEvery = _DEFAULTS.validate_every
    save_every: SaveEvery = _DEFAULTS.save_every
    seed: Seed = _DEFAULTS.seed
    split_seed: SplitSeed = _DEFAULTS.split_seed
    sources: Sources = None
    as_json: AsJson = False

    def settings(self, stage: str) -> LlavaTraining:
        """Returns the settings; options are named as the fields that they set."""
        values = {own.name: getattr(self, own.name) for own in fields(LlavaTraining) if own.name != "stage"}  # fmt: skip
        values |= {"pictures": tuple(self.pictures), "out": str(self.out)}
        values["sources"] = tuple(self.sources or ())
        values["init"] = None if self.init is None else str(self.init)
        return LlavaTraining(stage=stage, **values)


_OF_ADDITIONS = ("albums", "album", "rank", "lora_rate", "choice_answer")
"""Options that say nothing where the projector is trained alone."""


def register(group: typer.Typer) -> None:
    """Adds the commands to the group `train`."""
    projector = with_options(projector_command, leave_out=_OF_ADDITIONS, options=LlavaOptions)
    group.command("projector")(projector)
    group.command("llava")(with_options(llava_command, options=LlavaOptions))


def projector_command(options: LlavaOptions) -> None:
    """Train the projector of a small LLaVA on captions, before a frozen decoder."""
    _run(options.settings("projector"), options.as_json)


def llava_command(options: LlavaOptions) -> None:
    """Train projector and low-rank additions of a small LLaVA on composed scenes; `oval models build smol-llava` takes them up."""
    _run(options.settings("llava"), options.as_json)


def _run(settings: LlavaTraining, as_json: bool) -> None:
    from rich.console import Console

    errors = Console(stderr=True)
    report = _train(errors, settings)
    _show(Console(stderr=as_json), report)
    if as_json:
        typer.echo(json.dumps(report.to_dict()))


def _train(console: Console, settings: LlavaTraining) -> LlavaReport:
    from oval_adapters.training.llava_run import load_learner, train_and_save_llava

    with console.status("loading the decoder, the tower and the pictures"):
        learner = load_learner(settings)
    try:
        with step_bar(console) as tick:
            return train_and_save_llava(learner, settings, tick)
    except KeyboardInterrupt:
        console.print(f"the same command goes on from what lies in {settings.out}", style="yellow", markup=False, soft_wrap=True)  # fmt: skip
        raise


def _show(console: Console, report: LlavaReport) -> None:
    from rich import box
    from rich.table import Table

    title = f"new pictures, {report.updates} updates"
    if report.resumed_at:
        title += f", {report.resumed_at} of them in an earlier run"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for name in ("updates", "minutes", "loss", "naming %", "vanilla %", "circular %", "never seen %"):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    for entry in report.curve:
        known, unseen = entry["known"], entry["never_seen"]
        shares = [known["by_task"]["naming"]["vanilla"], known["vanilla"], known["circular"], unseen["vanilla"]]  # fmt: skip
        loss = "" if entry["loss"] is None else f"{entry['loss']:.3f}"
        cells = (str(entry["updates"]), f"{entry['seconds'] / 60:.1f}", loss)
        table.add_row(*cells, *(f"{100 * share:.1f}" for share in shares))
    console.print(table)
    names = f"{report.known_names} names, {report.never_seen_names} more were held out"
    speed = f", {report.questions_per_s:.1f} questions/s" if report.questions_per_s else ""
    for line in (names, f"saved to {report.out}: {report.file_bytes / 1e6:.1f} MB{speed}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
