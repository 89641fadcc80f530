"""Draws reports. matplotlib is no dependency: without it, a clear error before anything is measured."""

from __future__ import annotations

import importlib.util
from itertools import groupby
from pathlib import Path

from oval_adapters.bench.prefetch_values import PrefetchReport
from oval_adapters.bench.tier_facts import tier_line
from oval_adapters.bench.values import DecodeReport
from oval_core.errors import ConfigError


def check_plot(path: Path) -> None:
    """Raises `ConfigError` unless a plot can be drawn to this file."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "plot: matplotlib is not installed. Allowed: --plot where it can be imported. Install it with "
            "pip install matplotlib, or leave --plot out and use --json."
        )
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"plot: got {path}. Allowed: a .png, .svg or .pdf file. Rename it.")
    if not path.parent.is_dir():
        raise ConfigError(
            f"plot: no folder {path.parent}. Allowed: an existing one. Make it first."
        )


def draw_decode(report: DecodeReport, path: Path) -> None:
    """Writes median (line) and p99 (upper edge of the band) of the time a token, over the context."""
    from matplotlib.figure import Figure  # no pyplot: it would keep a global figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    contexts = [row.context for row in report.rows]
    for label, side in (("Hugging Face", "hf"), ("OVAL", "oval")):
        median = [getattr(row, f"{side}_ms_p50") for row in report.rows]
        high = [getattr(row, f"{side}_ms_p99") for row in report.rows]
        (line,) = axes.plot(contexts, median, marker="o", label=label)
        axes.fill_between(contexts, median, high, alpha=0.2, color=line.get_color())
    axes.set_xlabel("tokens in the cache")
    axes.set_ylabel("ms a token (median, band to p99)")
    title = f"{report.model}, {report.dtype}, {report.threads} threads, {report.backend}"
    axes.set_title(f"{title}\n{tier_line(report.tiers)}".strip())
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120)


def draw_prefetch(report: PrefetchReport, path: Path) -> None:
    """Writes the time a token of each order as a bar, with lines for computation and transfers: side by side, one
    field for each context and size of fast memory."""
    from matplotlib.figure import Figure

    groups = groupby(report.rows, key=lambda row: (row.context, row.fast_tokens))
    fields = [list(rows) for _, rows in groups]
    figure = Figure(figsize=(2 + 3.5 * len(fields), 4.5), layout="constrained")
    for axes, rows in zip(figure.subplots(1, len(fields), squeeze=False)[0], fields, strict=True):
        scale = 1e3 / report.steps
        orders = [row.order for row in rows]
        axes.bar(orders, [row.total_s * scale for row in rows], color="lightgrey", label="total")
        for name in ("compute", "transfer"):
            times = [getattr(row, f"{name}_s") * scale for row in rows]
            axes.plot(orders, times, marker="o", label=name)
        speed = "" if rows[0].link_gbps is None else f" {rows[0].link_gbps:g} GB/s"
        facts = f"{rows[0].context} tokens, {rows[0].fast_tokens} fast"
        axes.set_title(f"{facts}\n{rows[0].link}{speed}", fontsize="medium")
        axes.set_ylabel("ms a token")
        axes.legend()
    disk = "" if report.disk is None else ", direct disk" if report.direct_io else ", disk"
    figure.suptitle(f"{report.model}, {report.dtype}, {report.threads} threads{disk}")
    figure.savefig(path, dpi=120)
