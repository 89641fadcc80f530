"""`oval eval`: measures what OVAL promises, on prompts of the user's choice."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oval_adapters.cli import eval_mmbench, eval_vqa
from oval_adapters.cli.bench_options import AsJson, Device, Dtype, Model, Plot
from oval_adapters.cli.option_groups import with_options
from oval_adapters.cli.output_paths import check_output_file, check_output_folder, write_page
from oval_adapters.cli.sides_options import SidesOptions
from oval_adapters.cli.tier_options import TierOptions, check_for_model
from oval_adapters.evaluation.settings import AcceptanceSettings

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from oval_adapters.attachment import Attachment
    from oval_adapters.evaluation.kept_rows import KeptRows
    from oval_adapters.evaluation.ranks import Ranks
    from oval_adapters.evaluation.report import AcceptanceReport
    from oval_adapters.evaluation.rows import Row
    from oval_adapters.evaluation.units import Skipped, Unit
    from oval_core.config import OvalConfig

Prompts = Annotated[
    str,
    typer.Option(
        metavar="FILE",
        help="Spec-Bench, MT-bench, GSM8K or HumanEval .jsonl, or a prompt a line; also with .gz.",
    ),
]
Limit = Annotated[int | None, typer.Option(help="Only the first so many prompts.")]
PerCategory = Annotated[int | None, typer.Option(help="Only the first so many of each category.")]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens an answer, at most.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy; above 0 samples.")]
Seed = Annotated[int, typer.Option(help="Of the sampling.")]
BatchSize = Annotated[int, typer.Option(help="Prompts that are decoded together.")]
Against = Annotated[
    str | None, typer.Option(metavar="hf", help="Also decode with plain Hugging Face: hf.")
]
Config = Annotated[str | None, typer.Option(help="A shipped configuration or a YAML file.")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page that stands alone.")]  # fmt: skip
Out = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Keep what is done, prompt by prompt.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with what lies in --out.")]

_DEFAULTS = AcceptanceSettings(model="smol", prompts="-", sides=())


def register(app: typer.Typer) -> None:
    """Adds the group `eval`."""
    group = typer.Typer(
        no_args_is_help=True, help="Measure speculative decoding, and answers about images."
    )
    command = with_options(acceptance_command, sides=SidesOptions, tiers=TierOptions)
    group.command("acceptance")(command)
    eval_mmbench.register(group)
    eval_vqa.register(group)
    app.add_typer(group, name="eval")


def acceptance_command(
    prompts: Prompts,
    model: Model = _DEFAULTS.model,
    limit: Limit = _DEFAULTS.limit,
    per_category: PerCategory = _DEFAULTS.per_category,
    max_new_tokens: MaxNewTokens = _DEFAULTS.max_new_tokens,
    temperature: Temperature = _DEFAULTS.temperature,
    seed: Seed = _DEFAULTS.seed,
    batch_size: BatchSize = _DEFAULTS.batch_size,
    against: Against = None,
    config: Config = None,
    dtype: Dtype = "float32",
    device: Device = "auto",
    out: Out = None,
    resume: Resume = False,
    html: Html = None,
    plot: Plot = None,
    as_json: AsJson = False,
    sides: SidesOptions = SidesOptions(),
    tiers: TierOptions = TierOptions(),
) -> None:
    """Decode prompts with and without drafts, in turn: tokens a step, acceptance, speed, and whether texts are the same.

    Several processes share the prompts: accelerate launch --multi_gpu --num_processes 2 $(which oval) eval acceptance ...
    (also without a GPU), or torchrun. In float32 texts must be identical; in bfloat16 they may part at near-ties.
    """
    from oval_adapters.evaluation.ranks import ranks

    ready = _config(config, tiers)
    settings = AcceptanceSettings(
        model=model,
        prompts=prompts,
        sides=sides.sides(ready),
        limit=limit,
        per_category=per_category,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        batch_size=batch_size,
        against_hf=_against_hf(against),
    )
    _check_outputs(out, resume, html, plot)
    with ranks() as us:
        job = _prepare(settings, ready, dtype, device, out, resume, us)
        with job.oval:
            rows, whole = _measure(job, us)
        if us.is_first:
            _report(job, rows, whole, us, html, plot, as_json)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What is measured, all checked and loaded."""

    settings: AcceptanceSettings
    oval: Attachment
    tokenizer: PreTrainedTokenizerBase
    units: Sequence[Unit]
    skipped: Sequence[Skipped]
    num_later_turns: int
    done: Sequence[Row]
    kept: KeptRows | None
    console: Console


def _against_hf(against: str | None) -> bool:
    from oval_core.errors import ConfigError

    if against not in (None, "hf"):
        raise ConfigError(
            f"against: got {against!r}. Allowed: hf; plain decoding on OVAL always runs. Leave it out, or say hf."
        )
    return against is not None


def _check_outputs(out: Path | None, resume: bool, html: Path | None, plot: Path | None) -> None:
    from oval_core.errors import ConfigError

    if resume and out is None:
        raise ConfigError("resume: got it without --out. Allowed: with --out FOLDER. Name the folder.")  # fmt: skip
    if out is not None:
        check_output_folder("out", out)
    if html is not None:
        check_output_file("html", html)
    if plot is not None:
        from oval_adapters.bench.plot import check_plot

        check_output_file("plot", plot)
        check_plot(plot)


def _config(name: str | None, tiers: TierOptions) -> OvalConfig:
    from oval_adapters.config_files import load_config

    return tiers.apply(load_config(name))


def _prepare(
    settings: AcceptanceSettings,
    config: OvalConfig,
    dtype: str,
    device: str,
    out: Path | None,
    resume: bool,
    us: Ranks,
) -> _Job:
    """Loads the model once all that could be wrong without it is known to be right."""
    from rich.console import Console

    from oval_adapters.attachment import attach
    from oval_adapters.evaluation.kept_rows import KeptRows
    from oval_adapters.evaluation.prompt_files import read_prompts, take
    from oval_adapters.evaluation.ranks import started_alone
    from oval_adapters.evaluation.units import make_units, stamp_of
    from oval_adapters.load_model import load_config_of, load_model, load_tokenizer

    console = Console(stderr=True, quiet=not us.is_first)
    if started_alone():
        note = "one process: accelerate launch --cpu starts several with mpirun only; use --multi_gpu (also without a GPU) or torchrun"
        console.print(note, style="yellow", highlight=False, soft_wrap=True)
    with console.status(f"loading {settings.model}"):
        chosen = take(read_prompts(settings.prompts), settings.limit, settings.per_category)
        hf_config = load_config_of(settings.model)
        check_for_model(config, hf_config)
        tokenizer = load_tokenizer(settings.model)
        units, skipped = make_units(
            tokenizer, hf_config, chosen, settings.max_new_tokens, settings.batch_size
        )
        kept, done = None, []
        if out is not None:
            told = {**settings.to_dict(), "dtype": dtype, "config": str(config)}
            stamp = stamp_of(told, units)
            told["config"] = asdict(config)
            kept = KeptRows(out, stamp, resume=resume, rank=us.index, settings=told)
            done = kept.read()
        us.gather([])  # nobody writes before all have read
        oval = attach(load_model(settings.model, dtype, device), config)
    return _Job(
        settings=settings,
        oval=oval,
        tokenizer=tokenizer,
        units=units,
        skipped=skipped,
        num_later_turns=sum(prompt.num_later_turns for prompt in chosen),
        done=done,
        kept=kept,
        console=console,
    )


def _measure(job: _Job, us: Ranks) -> tuple[list[Row], bool]:
    """Returns the rows of all processes, and whether they are whole: Ctrl-C keeps those that are done."""
    from oval_adapters.cli.progress import step_bar
    from oval_adapters.evaluation.run import measure, warm_up

    known = {row.unit for row in job.done}
    mine = us.share([unit for unit in job.units if unit.number not in known])
    if job.kept is not None:
        job.kept.open()
    rows: list[Row] = []
    with contextlib.suppress(KeyboardInterrupt), step_bar(job.console) as step:
        if mine:
            warm_up(job.oval, mine[0], job.settings)
        for row in measure(job.oval, mine, job.settings):
            if job.kept is not None:
                job.kept.add(row)
            rows.append(row)
            step(row.category, len(rows), len(mine))
    if len(rows) < len(mine) and us.count > 1:
        raise KeyboardInterrupt  # the other processes were stopped too: nothing can be gathered
    every = sorted([*job.done, *us.gather(rows)], key=lambda row: row.unit)
    return every, len(every) == len(job.units)


def _report(
    job: _Job,
    rows: list[Row],
    whole: bool,
    us: Ranks,
    html: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    from rich.console import Console

    from oval_adapters.bench.tier_facts import tier_facts
    from oval_adapters.cli.app import INTERRUPTED_STATUS
    from oval_adapters.evaluation.report import make_report

    if rows:
        report = make_report(
            job.settings,
            rows,
            job.oval,
            whole=whole,
            skipped=job.skipped,
            num_later_turns=job.num_later_turns,
            processes=us.count,
            tiers=tier_facts(job.oval.config.tiers),
        )
        _show(Console(stderr=as_json), report)
        if as_json:
            typer.echo(json.dumps(report.to_dict()))
        _write(job, report, html, plot)
    if not whole:
        kept = "" if job.kept is None else "; --resume goes on from there"
        job.console.print(f"interrupted: {len(rows)} of {len(job.units)} are done{kept}", style="yellow")  # fmt: skip
        raise typer.Exit(INTERRUPTED_STATUS)


def _show(console: Console, report: AcceptanceReport) -> None:
    from oval_adapters.evaluation.settings import PLAIN
    from oval_adapters.evaluation.tables import legend, notes, tables

    settings, facts = report.settings, report.facts
    title = (
        f"{report.overall[PLAIN].prompts} prompts, {settings.model}, {facts['dtype']}, {facts['threads']} threads, up to {settings.max_new_tokens} "
        f"tokens, temperature {settings.temperature:g}, batch {settings.batch_size}"
    )
    console.print(title, style="italic", highlight=False, soft_wrap=True, markup=False)
    for table in tables(report):
        console.print(table)
    for note in notes(report):
        console.print(note, highlight=False, soft_wrap=True, markup=False)
    console.print(legend(), style="dim", highlight=False, soft_wrap=True, markup=False)


def _write(job: _Job, report: AcceptanceReport, html: Path | None, plot: Path | None) -> None:
    said: list[Any] = []
    if html is not None:
        from oval_adapters.evaluation.page import render_page
        from oval_adapters.evaluation.samples import make_samples

        samples = make_samples(job.tokenizer, report.rows, report.settings.sides[0].label)
        write_page("html", html, render_page(report, samples))
        said.append(html)
    if plot is not None:
        from oval_adapters.evaluation.plot import draw_acceptance

        draw_acceptance(report, plot)
        said.append(plot)
    for path in said:
        job.console.print(f"written to {path}", style="dim", markup=False, soft_wrap=True)
