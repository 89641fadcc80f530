"""Tables of what smol-llava answers right, made from records. Called by render_figures.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Result = dict[str, Any]

NAMES = {
    "known": "things that were trained on, new scenes",
    "never_seen": "things that were never trained on, options such things too",
    "albums": "albums of eight pictures, a question about one",
    "blank": "control: the first table with blank pictures",
    "mmbench_samples": "MMBench, 20 real rows",
}


def render_llava(result: Result) -> str:
    """Returns what benchmarks/llava_accuracy.py measured."""
    tables: dict[str, Result] = result["tables"]
    lines = [
        "| questions | number | vanilla (95 %) | circular (95 %) | seconds a question |",
        "|---|---|---|---|---|",
    ]
    for name, table in tables.items():
        cells = [_share(table, kind) for kind in ("vanilla", "circular")]
        pace = table["seconds_per_question"]
        lines.append(
            f"| {NAMES.get(name, name)} | {table['questions']} | {cells[0]} | {cells[1]} "
            f"| {'' if pace is None else f'{pace:.2f}'} |"
        )
    kinds = [name for name in tables if name != "mmbench_samples"]
    tasks = list(dict.fromkeys(task for name in kinds for task in tables[name]["by_category"]))
    lines += [
        "",
        "| by sort, vanilla / circular % | "
        + " | ".join(name.replace("_", " ") for name in kinds)
        + " |",
        "|---" * (len(kinds) + 1) + "|",
    ]
    for task in tasks:
        cells = [_both(tables[name]["by_category"].get(task)) for name in kinds]
        lines.append(f"| {task.replace('_', ' ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _share(table: Result, kind: str) -> str:
    share, interval = table.get(kind), table["intervals"].get(kind)
    if share is None:
        return ""
    return f"**{share:.1%}** ({interval[0]:.1%}-{interval[1]:.1%})"


def _both(own: Result | None) -> str:
    if own is None:
        return ""
    return " / ".join(f"{100 * own[kind]:.0f}" for kind in ("vanilla", "circular") if own.get(kind) is not None)  # fmt: skip


LLAVA: Mapping[str, Callable[[Result], str]] = {"llava": render_llava}
