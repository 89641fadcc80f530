"""Draws what `oval bench recall` measured: one picture a measure, a field for each kind of text and lead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oval_adapters.bench.plot import check_plot
from oval_adapters.bench.recall_values import LoopRow, RecallReport, RecallRow
from oval_core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_Row = RecallRow | LoopRow


def check_plot_folder(folder: Path) -> None:
    """Makes the folder; raises `ConfigError` unless plots can be drawn into it."""
    check_plot(Path("mass_recall.png"))  # whether there is matplotlib
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"plot: cannot make the folder {folder}: {error.strerror}. Allowed: a folder. Name another one."
        ) from error


def draw_recall(report: RecallReport, folder: Path) -> list[Path]:
    """Writes recall, output error and perplexity by budget; returns the files."""
    replayed = [row for row in report.rows if row.loop == report.settings.loops[0]]
    decoded = [row for row in report.decode if row.policy != "full"]
    pictures: list[tuple[str, Sequence[_Row], str, Callable[[Any], float | None]]] = [
        ("mass_recall", replayed, "attention mass covered", lambda row: row.mass_recall),
        ("output_error", replayed, "error of a head's output", lambda row: row.output_error),
        ("perplexity", decoded, "perplexity over full attention's", lambda r: r.perplexity_ratio),
    ]
    written = []
    for name, rows, label, value in pictures:
        if rows:
            path = folder / f"{name}.png"
            _draw(path, rows, label, value, f"{report.model}, {report.settings.context} tokens")
            written.append(path)
    return written


def _draw(
    path: Path,
    rows: Sequence[_Row],
    label: str,
    value: Callable[[Any], float | None],
    title: str,
) -> None:
    from matplotlib.figure import Figure  # no pyplot: it would keep a global figure

    kinds = list(dict.fromkeys(row.kind for row in rows))
    leads = sorted({row.lead for row in rows if row.lead}) or [0]
    size = (2.5 + 3.5 * len(kinds), 0.8 + 3.4 * len(leads))
    figure = Figure(figsize=size, layout="constrained")
    fields = figure.subplots(len(leads), len(kinds), squeeze=False, sharex=True)
    for line, lead in enumerate(leads):
        for column, kind in enumerate(kinds):
            shown = [row for row in rows if row.kind == kind and row.lead in (0, lead)]
            axes = fields[line][column]
            _lines(axes, shown, value)
            axes.set_title(f"{kind}, lead {lead}", fontsize="medium")
            axes.set_xlabel("budget, % of the text")
            axes.set_ylabel(label)
    figure.suptitle(title)
    handles, names = fields[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=120)


def _lines(axes: Axes, rows: Sequence[_Row], value: Callable[[Any], float | None]) -> None:
    names = list(dict.fromkeys(_name(row) for row in rows))
    for place, name in enumerate(names):
        own = [row for row in rows if _name(row) == name and value(row) is not None]
        style = "-" if all(row.lead for row in own) else ":"  # dotted: needs the layer's own query
        axes.plot(
            [100 * row.budget for row in own],
            [value(row) for row in own],
            linestyle=style,
            marker="osv^D"[(place + place // 10) % 5],
            markersize=4,
            label=name,
            color=f"C{place % 10}",
        )


def _name(row: _Row) -> str:
    policy = getattr(row, "policy", "routed")
    return row.signal if policy == "routed" else f"{row.signal}, {policy}"
