"""`oval bench`: measurements, in a table for people and in JSON for programs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oval_adapters.bench.values import DecodeSettings
from oval_adapters.cli.bench_options import (
    AsJson,
    Chunk,
    Device,
    Dtype,
    Model,
    Plot,
    end_bench,
    parse_numbers,
)
from oval_adapters.cli.fusion import fusion_command
from oval_adapters.cli.parity import parity_command
from oval_adapters.cli.prefetch import prefetch_command
from oval_adapters.cli.progress import progress_bar
from oval_adapters.cli.recall import recall_command
from oval_adapters.cli.router_cost import router_command
from oval_adapters.cli.self_draft import self_draft_command
from oval_adapters.cli.tier_options import TierOptions, check_for_model, with_tier_options

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel

    from oval_adapters.bench.values import DecodeReport, DecodeRow

Context = Annotated[str, typer.Option(help="Tokens in the cache, a list with commas.")]
Steps = Annotated[int, typer.Option(help="Timed decode steps a round.")]
Warmup = Annotated[int, typer.Option(help="Steps before them, not timed.")]
Rounds = Annotated[int, typer.Option(help="Turns of each side, alternating.")]
Backend = Annotated[str, typer.Option(help="OVAL's attention backend.")]
Linears = Annotated[
    str, typer.Option(help="OVAL's linear layers: auto, native, gemv, or hf as they are.")
]
Threads = Annotated[int | None, typer.Option(help="torch threads; torch chooses if not given.")]

_DEFAULTS = DecodeSettings()


def register(app: typer.Typer) -> None:
    """Adds the group `bench`."""
    group = typer.Typer(no_args_is_help=True, help="Measure OVAL against Hugging Face.")
    group.command("fusion")(fusion_command)
    group.command("self-draft")(self_draft_command)
    group.command("decode")(with_tier_options(decode_command))
    group.command("parity")(with_tier_options(parity_command))
    group.command("prefetch")(prefetch_command)
    group.command("recall")(recall_command)
    group.command("router")(router_command)
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
    tiers: TierOptions = TierOptions(),
) -> None:
    """Time a token, prefill and memory: Hugging Face (DynamicCache, sdpa, eager) and OVAL in turn, in one process."""
    from rich.console import Console

    from oval_core.config import OvalConfig

    errors = Console(stderr=True)
    settings = DecodeSettings(
        contexts=parse_numbers("context", context),
        steps=steps,
        warmup=warmup,
        rounds=rounds,
        chunk=chunk,
        backend=backend,
        linears=linears,
        tiers=tiers.apply(OvalConfig()).tiers,
    )
    with errors.status(f"loading {model}"):
        loaded = _prepare(model, settings, dtype, device, threads, plot)
    report, whole = _measure(errors, model, loaded, settings)
    _show(Console(stderr=as_json), report)
    if plot is not None and report.rows:
        from oval_adapters.bench.plot import draw_decode

        draw_decode(report, plot)
        errors.print(f"drawn to {plot}", style="dim", markup=False, soft_wrap=True)
    end_bench(errors, report.to_dict(), as_json=as_json, whole=whole)


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
    from oval_core.config import OvalConfig
    from oval_core.errors import ConfigError

    if plot is not None:
        from oval_adapters.bench.plot import check_plot

        check_plot(plot)
    if threads is not None:
        if threads < 1:
            raise ConfigError(f"threads: got {threads}. Allowed: 1 or more. Choose such a value.")
        torch.set_num_threads(threads)
    config = load_config_of(model)
    check_settings(config, settings)
    check_for_model(OvalConfig(tiers=settings.tiers), config)
    return load_model(model, dtype, device, attention="sdpa")


def _measure(
    console: Console, name: str, model: PreTrainedModel, settings: DecodeSettings
) -> tuple[DecodeReport, bool]:
    """Returns the report, and whether it is whole: Ctrl-C keeps the rows that are done."""
    from oval_adapters.bench.decode import describe, measure_decode, num_ticks

    rows: list[DecodeRow] = []
    whole = False
    with progress_bar(console, num_ticks(model.config, settings)) as advance:
        tick = None if advance is None else lambda label: advance(label, 1)
        with contextlib.suppress(KeyboardInterrupt):  # the rows so far are kept and shown
            for row in measure_decode(model, settings, tick):
                rows.append(row)
            whole = True
    return describe(name, model, settings, rows), whole


def _show(console: Console, report: DecodeReport) -> None:
    from rich import box
    from rich.table import Table

    from oval_adapters.bench.tier_facts import tier_line

    tiers = "" if report.tiers is None else f", OVAL tiered: {tier_line(report.tiers)}"
    title = (
        f"decode, {report.model}, {report.dtype}, {report.device}, {report.threads} threads, "
        f"backend {report.backend}, linears {report.linears}{tiers}"
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
