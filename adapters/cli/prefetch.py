"""`oval bench prefetch`: how much of the time that KV takes to come is hidden, by what is fetched ahead."""

from __future__ import annotations

import contextlib
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oval_adapters.bench.prefetch_values import MATCH, ORDERS, PrefetchSettings
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
from oval_adapters.cli.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from oval_adapters.bench.prefetch_values import PrefetchReport, PrefetchRow

Context = Annotated[
    str, typer.Option(help="Tokens in the cache after the last step, a list with commas.")
]
Fast = Annotated[
    str,
    typer.Option(
        help="Sizes of fast memory, with commas: percentages of the context, or token counts."
    ),
]
Order = Annotated[
    str, typer.Option(help=f"What is fetched ahead, with commas: {', '.join(ORDERS)}, or all.")
]
LinkGbps = Annotated[
    str | None,
    typer.Option(
        metavar="GB/S|match",
        help="Model a link: slow transfers down to this, or so that they take as long as computing does.",
    ),
]
LinkLatency = Annotated[
    float, typer.Option("--link-latency-us", help="Microseconds a transfer, in the modelled link.")
]
Disk = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", help="Keep what is not in fast memory in a file there."),
]
DirectIo = Annotated[
    bool, typer.Option("--direct-io", help="Go past the page cache of the system.")
]
HostTokens = Annotated[
    int | None, typer.Option(help="Tokens that main memory holds besides; the rest goes to --disk.")
]
Steps = Annotated[int, typer.Option(help="Timed decode steps.")]
Warmup = Annotated[int, typer.Option(help="Steps before them, not timed.")]
Threads = Annotated[
    int | None,
    typer.Option(
        help="torch threads while decoding. On a CPU all cores but one if not given: the worker that moves pages is "
        "the copy engine here, and needs a core."
    ),
]
Rounds = Annotated[int, typer.Option(help="Times that each run is made; the median is shown.")]

_DEFAULTS = PrefetchSettings()


def prefetch_command(
    model: Model = "smol",
    context: Context = ",".join(map(str, _DEFAULTS.contexts)),
    fast: Fast = ",".join(_DEFAULTS.fast),
    link_gbps: LinkGbps = None,
    link_latency_us: LinkLatency = _DEFAULTS.link_latency_us,
    order: Order = "all",
    disk: Disk = None,
    direct_io: DirectIo = False,
    host_tokens: HostTokens = None,
    steps: Steps = _DEFAULTS.steps,
    warmup: Warmup = _DEFAULTS.warmup,
    chunk: Chunk = _DEFAULTS.chunk,
    dtype: Dtype = "float32",
    device: Device = "auto",
    threads: Threads = None,
    rounds: Rounds = _DEFAULTS.rounds,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Time decoding with KV larger than fast memory, and what prefetching hides of the transfers."""
    from rich.console import Console

    errors = Console(stderr=True)
    settings = PrefetchSettings(
        contexts=parse_numbers("context", context),
        fast=tuple(fast.split(",")),
        orders=_orders(order),
        link_gbps=_link(link_gbps),
        link_latency_us=link_latency_us,
        disk=disk,
        direct_io=direct_io,
        host_tokens=host_tokens,
        steps=steps,
        warmup=warmup,
        chunk=chunk,
        threads=threads,
        rounds=rounds,
    )
    with errors.status(f"loading {model}"):
        loaded, tokenizer = _prepare(model, settings, dtype, device, plot)
    report, whole = _measure(errors, model, loaded, tokenizer, settings)
    _show(Console(stderr=as_json), report)
    if plot is not None and report.rows:
        from oval_adapters.bench.plot import draw_prefetch

        draw_prefetch(report, plot)
        errors.print(f"drawn to {plot}", style="dim", markup=False, soft_wrap=True)
    end_bench(errors, report.to_dict(), as_json=as_json, whole=whole)


def _orders(text: str) -> tuple[str, ...]:
    from oval_core.errors import ConfigError, did_you_mean

    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in (*ORDERS, "all"):
            raise ConfigError(f"order: got {name!r}; {did_you_mean(name, (*ORDERS, 'all'))}")
    return ORDERS if "all" in names else names


def _link(text: str | None) -> float | str | None:
    from oval_core.errors import ConfigError

    if text is None or text == MATCH:
        return text
    try:
        gbps = float(text)
    except ValueError:
        gbps = 0.0
    if not gbps > 0:
        raise ConfigError(
            f"link-gbps: got {text!r}. Allowed: GB/s above 0, or {MATCH}. Choose one of these."
        )
    return gbps


def _prepare(
    model: str, settings: PrefetchSettings, dtype: str, device: str, plot: Path | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from oval_adapters.bench.prefetch import check_settings
    from oval_adapters.load_model import load_config_of, load_model, load_tokenizer

    if plot is not None:
        from oval_adapters.bench.plot import check_plot

        check_plot(plot)
    check_settings(load_config_of(model), settings)
    tokenizer = load_tokenizer(model)
    return load_model(model, dtype, device), tokenizer


def _measure(
    console: Console,
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: PrefetchSettings,
) -> tuple[PrefetchReport, bool]:
    """Returns the report, and whether it is whole: Ctrl-C keeps the rows that are done."""
    from oval_adapters.bench.prefetch import describe, measure_prefetch, num_ticks

    rows: list[PrefetchRow] = []
    whole = False
    # Ctrl-C: the rows so far are kept and shown
    with progress_bar(console, num_ticks(settings)) as tick, contextlib.suppress(KeyboardInterrupt):
        for row in measure_prefetch(model, tokenizer, settings, tick):
            rows.append(row)
        whole = True
    return describe(name, model, settings, rows), whole


def _show(console: Console, report: PrefetchReport) -> None:
    """Prints a table for each context and size of fast memory."""
    where = "" if report.disk is None else ", direct disk" if report.direct_io else ", disk"
    console.print(
        f"prefetch, {report.model}, {report.dtype}, {report.device}, {report.threads} threads, backend "
        f"{report.backend}, {report.link}{where}",
        style="italic",
        highlight=False,
        soft_wrap=True,
    )
    for _, rows in groupby(report.rows, key=lambda row: (row.context, row.fast_tokens)):
        _show_group(console, list(rows), report.steps)
    console.print(
        "ms and MB of a decoded token; compute: none less its waiting; transfer: the worker's time; stall: what layers "
        "waited; late: fetched, but not in time, or only when asked for; ratio: total / max(compute, transfer); tokens: "
        "compared with everything in fast memory",
        style="dim",
    )
    if any(row.ratio < 1 for row in report.rows):
        console.print(
            "a ratio below 1 cannot be: other programs slowed the run it is compared with. Raise --rounds, or wait for "
            "a quiet machine.",
            style="yellow",
        )


def _show_group(console: Console, rows: Sequence[PrefetchRow], steps: int) -> None:
    from rich import box
    from rich.table import Table

    first = rows[0]
    speed = "" if first.link_gbps is None else f" {first.link_gbps:g} GB/s"
    title = (
        f"{first.context} tokens, {first.fast_tokens} of them in fast memory ({first.fast_fraction:.1%}), "
        f"{first.link}{speed}; all in fast memory: {first.resident_s / steps * 1e3:.1f} ms"
    )
    names = ("order", "total", "compute", "transfer", "stall", "MB", "late", "wasted")
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False, padding=0)
    for name in (*names, "tokens", "ratio"):
        table.add_column(name, justify="left" if name == "order" else "right", no_wrap=True)
    for row in rows:
        seconds = (row.total_s, row.compute_s, row.transfer_s, row.stall_s)
        moved = (row.bytes_prefetched + row.bytes_demanded, row.bytes_late, row.bytes_wasted)
        table.add_row(
            row.order,
            *(f"{value / steps * 1e3:.1f}" for value in seconds),
            *(f"{value / steps / 1e6:.1f}" for value in moved),
            "identical" if row.identical else "differ",
            f"{row.ratio:.2f}",
        )
    console.print(table)
