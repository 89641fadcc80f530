"""Draws a report: acceptance by position, and tau by category. Needs matplotlib, which `check_plot` has asked for."""

from __future__ import annotations

from pathlib import Path

from oval_adapters.evaluation.report import AcceptanceReport

__all__ = ["draw_acceptance"]


def draw_acceptance(report: AcceptanceReport, path: Path) -> None:
    """Writes two fields: share of steps that accepted at each position, and tau by category."""
    from matplotlib.figure import Figure  # no pyplot: it would keep a global figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    sides = [side.label for side in report.settings.sides]
    width = 0.8 / len(sides)
    categories = [*report.categories, "all"]
    for place, label in enumerate(sides):
        shares = report.overall[label].accepted_by_position or ()
        left.plot(range(1, len(shares) + 1), shares, marker="o", label=label)
        own = [*report.by_category[label].values(), report.overall[label]]
        right.bar(
            [i + place * width for i in range(len(own))],
            [part.tau or 0.0 for part in own],
            width,
            label=label,
        )
    left.set_xlabel("position after the last token")
    left.set_ylabel("share of steps that accepted")
    left.set_ylim(0, 1)
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend()
    right.set_xticks(range(len(categories)), categories, rotation=30, ha="right")
    right.set_ylabel("tau (tokens a step)")
    settings = report.settings
    figure.suptitle(
        f"{settings.model}, {report.facts['dtype']}, temperature {settings.temperature:g}"
    )
    figure.savefig(path, dpi=120)
