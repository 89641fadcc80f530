"""Reports of `oval eval mmbench` and `oval eval vqa`: what goes into JSON, result files, tables and pages."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oval_adapters.evaluation.mm_run import Collected
from oval_mm.tsv import BadRow

__all__ = ["FAILED_NAME", "RESULTS_NAME", "TABLE_NAME", "MMReport", "Section", "budget_notes", "failures", "image_facts", "seconds", "write_report"]  # fmt: skip

RESULTS_NAME = "results.jsonl"
FAILED_NAME = "failed_rows.jsonl"
TABLE_NAME = "report.csv"
_FAR = 0.03
"""Share of the image tokens by which what is read may differ from the budget without a word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One table of a report.

    Attributes:
        title: above it.
        heads: of the columns; the first is for names.
        rows: of cells.
        is_long: whether it has texts, or a row a question: pages show it, terminals do not.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_long: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MMReport:
    """What a run gave, ready to be shown.

    Attributes:
        title: of the whole.
        values: for JSON.
        results: a row a question that was tried.
        failed: rows that could not be asked.
        table: in VLMEvalKit's form, a row a split; empty where there is none.
        sections: tables.
        notes: what the figures leave out.
        place: what `line` of the failed rows counts: see `oval_mm.vqa_files.VQAFile`.
    """

    title: str
    values: Mapping[str, Any]
    results: Sequence[Mapping[str, Any]]
    failed: Sequence[BadRow]
    table: Sequence[Mapping[str, Any]]
    sections: Sequence[Section]
    notes: Sequence[str]
    place: str = "line"


def failures(bad: Sequence[BadRow], collected: Collected, lines: Mapping[str, int]) -> list[BadRow]:
    """Returns rows that could not be read, and rows that could not be asked, by line.

    Args:
        bad: of the file.
        collected: of the run.
        lines: of questions, by their name.
    """
    failed = [
        BadRow(line=lines[row.name], index=row.name, reason=row.reason)
        for row in collected.rows
        if row.reason is not None
    ]
    return sorted([*bad, *failed], key=lambda row: (row.line, row.index))


def seconds(collected: Collected) -> dict[str, float | None]:
    """Returns the seconds of all rows, one after another, and their mean."""
    spent = [row.seconds for row in collected.rows]
    mean = sum(spent) / len(spent) if spent else None
    return {"seconds": sum(spent), "seconds_per_question": mean}


def image_facts(collected: Collected, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns budget and router of image tokens (None for all of them), and how many of them were read.

    Args:
        collected: of the run.
        settings: of the run, as plain values.
    """
    limit = settings.get("image_budget") or {"budget": None, "router": None}
    known = [row for row in collected.rows if row.image_tokens is not None]
    return {
        "image_budget": limit["budget"],
        "image_router": limit["router"],
        "image_tokens": sum(row.image_tokens or 0 for row in known),
        "image_tokens_read": sum(row.image_tokens_read or 0 for row in known),
    }


def budget_notes(collected: Collected, values: Mapping[str, Any]) -> list[str]:
    """Returns a note where pages are so few that what was read is far from what was asked for.

    Args:
        collected: of the run.
        values: with those of `image_facts`.
    """
    rows = [row for row in collected.rows if row.image_tokens and row.image_pages]
    budget = values["image_budget"]
    if not rows or budget is None:
        return []
    total = sum(row.image_tokens or 0 for row in rows)
    read = sum(row.image_tokens_read or 0 for row in rows) / total
    asked = budget if isinstance(budget, float) else sum(min(budget, row.image_tokens or 0) for row in rows) / total  # fmt: skip
    if abs(read - asked) <= _FAR:
        return []
    pages = sum(row.image_pages or 0 for row in rows) / len(rows)
    return [
        f"{read:.0%} of the image tokens were read where {asked:.0%} were asked for: a question has {pages:.3g} image pages, each "
        "is read whole or not at all; a smaller --tile makes more of them"
    ]


def write_report(folder: Path, report: MMReport) -> list[Path]:
    """Writes the result files into a folder; returns them. Their names do not depend on the data."""
    texts = {
        RESULTS_NAME: _lines(report.results),
        FAILED_NAME: _lines(asdict(row) for row in report.failed),
    }
    if report.table:
        texts[TABLE_NAME] = _csv(report.table)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        partial = folder / f"{name}.partial"
        # a lone surrogate of the data becomes an escape, which is right in JSON
        with partial.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / name)
    return [folder / name for name in texts]


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
