"""Draws how draft heads learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw_head_curve"]


def draw_head_curve(curve: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes top-1 (line) and top-5 (dashed) of each head, and tau of each tree size, by update."""
    from matplotlib.figure import Figure  # no pyplot: it would keep a global figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    updates = [entry["updates"] for entry in curve]
    for head in range(len(curve[0]["top1"])):
        (line,) = left.plot(
            updates, [e["top1"][head] for e in curve], marker="o", label=f"head {head + 1}"
        )
        left.plot(updates, [e["top5"][head] for e in curve], linestyle="--", color=line.get_color())
    for size in curve[0]["tau"]:
        right.plot(updates, [e["tau"][size] for e in curve], marker="o", label=f"{size} nodes")
    left.set_title("accuracy, held out: top-1, and top-5 dashed", fontsize="medium")
    right.set_title("tokens a step, held out, by drafted nodes", fontsize="medium")
    for axes in (left, right):
        axes.set_xlabel("updates")
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
