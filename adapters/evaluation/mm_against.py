"""A run of MMBench against an earlier one, question by question: who was right where the other was not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oval_adapters.evaluation.mm_report import RESULTS_NAME, MMReport, Section
from oval_core.errors import ConfigError
from oval_mm.paired import Paired, paired

if TYPE_CHECKING:
    from oval_mm.mmbench import Question

__all__ = ["check_same_file", "compare", "read_results", "with_comparison"]

_NEEDED = ("index", "group", "options", "right", "hit")
_NOTHING_IN_COMMON = "against: the two runs have no scored question in common. Allowed: a run on the same file. Give such a one."


def read_results(path: str | Path) -> list[dict[str, Any]]:
    """Reads the result file of a run, or of the folder of one.

    Raises:
        ConfigError: it is none.
    """
    path = Path(path).expanduser()
    path = path / RESULTS_NAME if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"against: cannot read {path}: {error}. Allowed: the {RESULTS_NAME} of `oval eval mmbench --out FOLDER`, or that "
            "folder. Check the path."
        ) from error
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or any(name not in row for name in _NEEDED):
            raise ConfigError(
                f"against: line {number} of {path} is no row of such a run. Allowed: the {RESULTS_NAME} of `oval eval mmbench`. "
                "Check the path."
            )
        rows.append(row)
    return rows


def check_same_file(questions: Iterable[Question], other: Iterable[Mapping[str, Any]]) -> None:
    """Checks, before any question is asked, that another run asked some of the same, in the same orders of options.

    Args:
        questions: that are going to be asked.
        other: rows of results of the other run.
    Raises:
        ConfigError: none of them can be compared, or one has other options there.
    """
    known = {row["index"]: row for row in other if row["hit"] is not None}
    asked = [question for question in questions if question.index in known]
    for question in asked:
        _check_row(question.index, dict(question.options), question.answer, known[question.index])
    if not asked:
        raise ConfigError(_NOTHING_IN_COMMON)


def _check_row(index: object, options: object, right: object, other: Mapping[str, Any]) -> None:
    if (options, right) != (other["options"], other["right"]):
        raise ConfigError(
            f"against: question {index} has other options there. Allowed: a run on the same file. Give such a one."
        )


def compare(
    first: Iterable[Mapping[str, Any]], second: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the comparison of two runs over the rows that both have, ready for JSON.

    Args:
        first: rows of results.
        second: the same of the other run.
    Raises:
        ConfigError: they have no row in common, or asked different questions.
    """
    known = {row["index"]: row for row in second if row["hit"] is not None}
    pairs = []
    for row in first:
        other = known.get(row["index"])
        if other is None or row["hit"] is None:
            continue
        _check_row(row["index"], row["options"], row["right"], other)
        pairs.append((row, other))
    if not pairs:
        raise ConfigError(_NOTHING_IN_COMMON)
    vanilla = paired((a["hit"], b["hit"]) for a, b in pairs if a["index"] == a["group"])
    found = {"rows": len(pairs), "vanilla": vanilla.to_dict(), "circular": None}
    groups: dict[Any, list[tuple[bool, bool]]] = {}
    for a, b in pairs:
        groups.setdefault(a["group"], []).append((a["hit"], b["hit"]))
    if any(len(own) > 1 for own in groups.values()):
        whole = [(all(a for a, _ in own), all(b for _, b in own)) for own in groups.values()]
        found["circular"] = paired(whole).to_dict()
    return found


def with_comparison(report: MMReport, path: Path, other: Sequence[Mapping[str, Any]]) -> MMReport:
    """Returns a report with what its run has over another one; what cannot be compared after all becomes a note.

    Args:
        report: of this run.
        path: of the other, as the user typed it; its name is shown.
        other: rows of the other.
    """
    try:
        found = {"name": path.name, **compare(report.results, other)}
    except ConfigError as error:  # every row that both have failed here: the report is worth having
        values = {**report.values, "against": None}
        return replace(report, values=values, notes=[*report.notes, str(error)])
    heads = ("", "questions", "this %", "other %", "only this right", "only other right", "p (McNemar)")  # fmt: skip
    rows = [_row(name, found[name]) for name in ("vanilla", "circular") if found[name] is not None]
    section = Section(title=f"Against {path.name}", heads=heads, rows=rows)
    return replace(
        report,
        values={**report.values, "against": found},
        sections=[*report.sections, section],
    )


def _row(name: str, own: Mapping[str, Any]) -> list[str]:
    counts = Paired(**{k: own[k] for k in ("both", "only_first", "only_second", "neither")})
    shares = [f"{100 * own[k]:.1f}" if own[k] is not None else "" for k in ("first", "second")]
    return [name, str(counts.questions), *shares, str(counts.only_first), str(counts.only_second), f"{counts.p_value:.3g}"]  # fmt: skip
