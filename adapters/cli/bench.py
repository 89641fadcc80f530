"""`oval bench`: measurements, in a table for people and in JSON for programs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oval_adapters.bench.values import DecodeSettings
from oval_adapters.cli.parity import parity_command

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel

    from oval_adapters.bench.values import DecodeReport, DecodeRow

Model = Annotated[str, typer.Option("--model", help="smol, a folder, or a hub id OWNER/NAME.")]
Context = Annotated[str, typer.Option(help="Tokens in the cache, a list with commas.")]
Steps = Annotated[int, typer.Option(help="Timed decode steps a round.")]
Warmup = Annotated[int, typer.Option(help="Steps before them, not timed.")]
Rounds = Annotated[int, typer.Option(help="Turns of each side, alternating.")]
Chunk = Annotated[int, typer.Option(help="Tokens a forward of the prefill.")]
Backend = Annotated[str, typer.Option(help="OVAL's attention backend.")]
Linears = Annotated[str, typer.Option(help="OVAL's linear layers: auto, gemv, or hf as they are.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16, for both sides.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Threads = Annotated[int | None, typer.Option(help="torch threads; torch chooses if not given.")]
Plot = Annotated[Path | None, typer.Option(help="Also draw to this .png (needs matplotlib).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, last on stdout.")]

_DEFAULTS = DecodeSettings()


def register(app: typer.Typer) -> None:
    """Adds the group `bench`."""
    group = typer.Typer(no_args_is_help=True, help="Measure OVAL against Hugging Face.")
    group.command("decode")(decode_command)
    group.command("parity")(parity_command)
    app.add_typer(group, name="bench")


def decode_command(
    model: Model = "smol",
    context: Context = ",".join(map(str, _DEFAULTS.contexts)),
    steps: Steps = _DEFAULTS.steps,
    warmup: Warmup = _DEFAULTS.warmup,
    rounds: Rounds = _DEFAULTS.rounds,
    chunk: Chunk = _DEFAULTS.chunk,
    backend: Backend = _DEFAULTS.backend,
    linears: Linears = _DEFAULTS.linears,
    dtype: Dtype = "bfloat16",
    device: Device = "auto",
    threads: Threads = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Time a token, prefill and memory: Hugging Face (DynamicCache, sdpa, eager) and OVAL in turn, in one process."""
    from rich.console import Console

    errors = Console(stderr=True)
    settings = DecodeSettings(
        contexts=_contexts(context),
        steps=steps,
        warmup=warmup,
        rounds=rounds,
        chunk=chunk,
        backend=backend,
        linears=linears,
    )
    with errors.status(f"loading {model}"):
        loaded = _prepare(model, settings, dtype, device, threads, plot)
    report, whole = _measure(errors, model, loaded, settings)
    _show(Console(stderr=as_json), report)
    if plot is not None and report.rows:
        from oval_adapters.bench.plot import draw_decode

        draw_decode(report, plot)
        errors.print(f"drawn to {plot}", style="dim", markup=False, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    if not whole:
        from oval_adapters.cli.app import INTERRUPTED_STATUS

        errors.print(
            "interrupted: the rows above are whole, the others are missing", style="yellow"
        )
        raise typer.Exit(INTERRUPTED_STATUS)


def _prepare(
    model: str,
    settings: DecodeSettings,
    dtype: str,
    device: str,
    threads: int | None,
    plot: Path | None,
) -> PreTrainedModel:
    import torch

    from oval_adapters.bench.decode import check_settings
    from oval_adapters.load_model import load_config_of, load_model
    from oval_core.errors import ConfigError

    if plot is not None:
        from oval_adapters.bench.plot import check_plot

        check_plot(plot)
    if threads is not None:
        if threads < 1:
            raise ConfigError(f"threads: got {threads}. Allowed: 1 or more. Choose such a value.")
        torch.set_num_threads(threads)
    check_settings(load_config_of(model), settings)
    return load_model(model, dtype, device, attention="sdpa")


def _contexts(text: str) -> tuple[int, ...]:
    from oval_core.errors import ConfigError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"context: got {text!r}. Allowed: whole numbers with commas, such as 1024,4096. Give these."
        ) from error


def _measure(
    console: Console, name: str, model: PreTrainedModel, settings: DecodeSettings
) -> tuple[DecodeReport, bool]:
    """Returns the report, and whether it is whole: Ctrl-C keeps the rows that are done."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from oval_adapters.bench.decode import describe, measure_decode, num_ticks

    rows: list[DecodeRow] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    # no refresh thread: it would run while a step is timed
    progress = Progress(*columns, console=console, auto_refresh=False, transient=True)
    whole = False
    with progress:
        task = progress.add_task("", total=num_ticks(model.config, settings))

        def tick(label: str) -> None:
            progress.update(task, advance=1, description=label, refresh=True)

        with contextlib.suppress(KeyboardInterrupt):  # the rows so far are kept and shown
            for row in measure_decode(model, settings, tick if console.is_terminal else None):
                rows.append(row)
            whole = True
    return describe(name, model, settings, rows), whole


def _show(console: Console, report: DecodeReport) -> None:
    from rich import box
    from rich.table import Table

    title = (
        f"decode, {report.model}, {report.dtype}, {report.device}, {report.threads} threads, "
        f"backend {report.backend}, linears {report.linears}"
    )
    names = (
        "context",
        "",
        "ms p50",
        "ms p99",
        "ratio",
        "prefill s",
        "KV MB",
        "peak MB",
        "diff",
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in report.rows:
        for index, cells in enumerate(_cells(row)):
            table.add_row(*cells, end_section=index == 1)
    console.print(table)
    console.print(
        "ms of a decoded token; peak MB: growth of memory in a turn, cache and activations; "
        "diff: largest difference of the logits after the prefill",
        style="dim",
    )


def _cells(row: DecodeRow) -> Iterator[tuple[str, ...]]:
    """Yields a line for Hugging Face and a line for OVAL."""
    yield (
        str(row.context),
        "HF",
        f"{row.hf_ms_p50:.1f}",
        f"{row.hf_ms_p99:.1f}",
        "",
        f"{row.hf_prefill_s:.2f}",
        f"{row.kv_bytes / 1e6:.1f}",
        f"{row.hf_rss_mb:.0f}",
        "",
    )
    yield (
        "",
        "OVAL",
        f"{row.oval_ms_p50:.1f}",
        f"{row.oval_ms_p99:.1f}",
        f"{row.ratio:.3f}",
        f"{row.oval_prefill_s:.2f}",
        f"{row.oval_kv_bytes_allocated / 1e6:.1f}",
        f"{row.oval_rss_mb:.0f}",
        f"{row.max_logit_diff:.2g}",
    )
