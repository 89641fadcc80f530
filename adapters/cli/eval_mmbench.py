"""`oval eval mmbench`: asks a LLaVA model MMBench's questions, and what both image evaluations share."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oval_adapters.cli.option_groups import with_options
from oval_adapters.cli.output_paths import check_output_file, check_output_folder, write_page
from oval_adapters.cli.speculation_options import SpeculationOptions
from oval_adapters.cli.vision_options import VisionOptions

if TYPE_CHECKING:
    from rich.console import Console

    from oval_adapters.evaluation.mm_report import MMReport
    from oval_adapters.evaluation.mm_run import Ask, Collected, MMSettings
    from oval_adapters.evaluation.ranks import Ranks

_SHOWN_FAILURES = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerOptions:
    """Options of every evaluation on images, as Typer reads them: None where not given, `MMSettings` has the defaults."""

    config: Annotated[str | None, typer.Option(help="A shipped configuration or a YAML file.")] = (
        None
    )
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16. Default: auto.")] = None  # fmt: skip
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda. Default: auto.")] = None
    limit: Annotated[int | None, typer.Option(help="Only the first so many questions.")] = None
    max_new_tokens: Annotated[int | None, typer.Option(help="Tokens an answer, at most. Default: 32.")] = None  # fmt: skip
    pads_images: Annotated[bool | None, typer.Option("--pad-images", help="Make images square first, as LLaVA's own code does.")] = None  # fmt: skip
    blanks_images: Annotated[bool | None, typer.Option("--blank-images", help="Show the mean colour only: what is known without seeing.")] = None  # fmt: skip
    strict: Annotated[bool | None, typer.Option("--strict", help="Refuse bad rows and answers that leave a doubt.")] = None  # fmt: skip
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Keep answers, row by row, and the result files.")] = None  # fmt: skip
    resume: Annotated[
        bool | None, typer.Option("--resume", help="Go on with what lies in --out.")
    ] = None
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page that stands alone.")] = None  # fmt: skip
    as_json: Annotated[bool | None, typer.Option("--json", help="Print the result as JSON, last on stdout.")] = None  # fmt: skip

    def settings(
        self, model: str, vision: VisionOptions, speculation: SpeculationOptions
    ) -> MMSettings:
        """Returns how questions are asked, once all that can be wrong without a model is known to be right."""
        from oval_adapters.config_files import load_config
        from oval_adapters.evaluation.mm_run import MMSettings
        from oval_adapters.load_model import resolve_device, resolve_dtype
        from oval_adapters.named_parts import check_names
        from oval_adapters.vision.prefill_settings import check_image_clip
        from oval_core.errors import ConfigError

        if self.resume and self.out is None:
            raise ConfigError("resume: got it without --out. Allowed: with --out FOLDER. Name the folder.")  # fmt: skip
        if self.out is not None:
            check_output_folder("out", self.out)
        if self.html is not None:
            check_output_file("html", self.html)
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit: got {self.limit}. Allowed: 1 or more. Give such a number.")
        names = ("dtype", "device", "max_new_tokens", "pads_images", "blanks_images")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        config = speculation.apply(vision.apply(load_config(self.config)))
        given["downsample"] = vision.downsample
        settings = MMSettings(model=model, config=config, **given)
        resolve_dtype(settings.dtype, resolve_device(settings.device))
        check_names(config)
        check_image_clip(config.vision)
        return settings


Model = Annotated[str, typer.Option(help="A LLaVA model: a folder, or a hub id OWNER/NAME.")]
Data = Annotated[Path, typer.Option(metavar="FILE.tsv", help="MMBench's table, images inside.")]
Circular = Annotated[
    bool | None,
    typer.Option(
        "--circular/--vanilla",
        help="Ask every order of the options, or the first only. Default: what the file has.",
    ),
]
Against = Annotated[
    Path | None,
    typer.Option(metavar="FILE|FOLDER", help="Compare with an earlier run's results.jsonl, question by question (McNemar)."),
]  # fmt: skip
Prompt = Annotated[str, typer.Option(help="Form of the prompt: llava or generic.")]


def register(group: typer.Typer) -> None:
    """Adds `mmbench` to the group `eval`."""
    group.command("mmbench")(
        with_options(
            mmbench_command,
            options=AnswerOptions,
            vision=VisionOptions,
            speculation=SpeculationOptions,
        )
    )


def mmbench_command(
    model: Model,
    data: Data,
    options: AnswerOptions,
    vision: VisionOptions,
    speculation: SpeculationOptions,
    circular: Circular = None,
    prompt: Prompt = "llava",
    against: Against = None,
) -> None:
    """Ask a LLaVA model MMBench's questions: circular and vanilla accuracy, by category, with the reason of each verdict.

    Letters are found as VLMEvalKit finds them without a judge; --strict takes only answers that leave no doubt. Several
    processes share the rows: accelerate launch --multi_gpu --num_processes 2 $(which oval) eval mmbench ... or torchrun.
    """
    from oval_adapters.evaluation.mm_against import check_same_file, read_results, with_comparison
    from oval_adapters.evaluation.mm_mmbench import make_plan, mmbench_report
    from oval_adapters.evaluation.ranks import ranks
    from oval_mm.mmbench import read_mmbench

    settings = options.settings(model, vision, speculation)
    other = None if against is None else read_results(against)
    with ranks() as us:
        file = read_mmbench(data, strict=bool(options.strict))
        plan = make_plan(
            data.name,
            file,
            circular=circular,
            limit=options.limit,
            style=prompt,
            strict=bool(options.strict),
        )
        if other is not None:
            check_same_file(plan.questions, other)

        def make_report(collected: Collected) -> MMReport:
            report = mmbench_report(plan, collected, settings.to_dict())
            return report if other is None else with_comparison(report, against, other)

        run_evaluation(
            plan.asks(),
            settings,
            options,
            us,
            make_report,
        )


def run_evaluation(
    asks: Sequence[Ask],
    settings: MMSettings,
    options: AnswerOptions,
    us: Ranks,
    make_report: Callable[[Collected], MMReport],
) -> None:
    """Asks everything, shows and writes the report; leaves the program with its status if something was cut off.

    Args:
        asks: the questions.
        settings: how they are asked.
        options: what the user gave.
        us: the processes.
        make_report: from the answers.
    """
    from rich.console import Console

    from oval_adapters.cli.app import INTERRUPTED_STATUS
    from oval_adapters.cli.progress import step_bar
    from oval_adapters.evaluation.mm_report import write_report
    from oval_adapters.evaluation.mm_run import collect
    from oval_adapters.evaluation.ranks import started_alone

    console = Console(stderr=True, quiet=not us.is_first)
    if started_alone():
        note = "one process: accelerate launch --cpu starts several with mpirun only; use --multi_gpu (also without a GPU) or torchrun"
        console.print(note, style="yellow", highlight=False, soft_wrap=True)
    if options.out is None:
        console.print("answers are not kept: name a folder with --out", style="dim")
    bar = functools.partial(step_bar, console)
    collected = collect(settings, asks, us, bar, out=options.out, resume=bool(options.resume))
    if not us.is_first:
        return
    if collected.rows:
        report = make_report(collected)
        written = [] if options.out is None else write_report(options.out, report)
        _show(report, options)
        if options.as_json:
            typer.echo(json.dumps(report.values))
        _say_written(report, options, written, console)
    if not collected.whole:
        kept = "" if options.out is None else "; --resume goes on from there"
        done = f"interrupted: {len(collected.rows)} of {len(asks)} are done{kept}"
        console.print(done, style="yellow")
        raise typer.Exit(INTERRUPTED_STATUS)
    _check_answered(collected)


def _check_answered(collected: Collected) -> None:
    from oval_core.errors import ConfigError

    if all(row.answer is None for row in collected.rows):
        first = collected.rows[0]
        raise ConfigError(
            f"data: none of {len(collected.rows)} rows could be asked, the first ({first.name}): {first.reason}. Allowed: at "
            "least one. Mend the file, or give another model."
        )


def _say_written(
    report: MMReport, options: AnswerOptions, written: list[Path], console: Console
) -> None:
    """Names the result files, and writes the page: the figures are out by now, whatever becomes of it."""
    from oval_adapters.evaluation.mm_page import render_mm_page

    if options.html is not None:
        write_page("html", options.html, render_mm_page(report))
        written = [*written, options.html]
    for path in written:
        console.print(f"written to {path}", style="dim", markup=False, soft_wrap=True)


def _show(report: MMReport, options: AnswerOptions) -> None:
    from rich.console import Console

    from oval_adapters.evaluation.mm_page import facts_line, terminal_tables

    console = Console(stderr=bool(options.as_json))
    say = functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)
    say(f"{report.title}: {facts_line(report)}", style="italic")
    for table in terminal_tables(report):
        console.print(table)
    for note in report.notes:
        say(note)
    for row in report.failed[:_SHOWN_FAILURES]:
        index = f" (index {row.index})" if row.index else ""
        say(f"{report.place} {row.line}{index}: {row.reason}", style="yellow")
    more = len(report.failed) - _SHOWN_FAILURES
    if more > 0:
        say(f"... and {more} more rows that failed", style="yellow")
