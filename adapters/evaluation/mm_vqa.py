"""Questions with short answers: what they become when they are asked, and the report on the answers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from oval_adapters.evaluation.mm_report import (
    MMReport,
    Section,
    budget_notes,
    failures,
    image_facts,
    seconds,
)
from oval_adapters.evaluation.mm_run import Ask, Collected
from oval_mm.pictures import read_picture
from oval_mm.prompts import short_answer_prompt
from oval_mm.vqa_answers import FULL_ANSWERS, Scored, score
from oval_mm.vqa_files import VQAFile, VQAQuestion

__all__ = ["vqa_asks", "vqa_report"]

_SHOWN = 200
_Z95 = 1.96


def vqa_asks(file: VQAFile, questions: Sequence[VQAQuestion]) -> list[Ask]:
    """Returns the questions as a model is asked them."""
    return [
        Ask(
            name=question.name,
            label=question.kind or "questions",
            text=short_answer_prompt(question.question),
            pictures=(question.picture,),
            load=file.pictures.load if isinstance(question.picture, str) else read_picture,
        )
        for question in questions
    ]


def vqa_report(
    name: str,
    file: VQAFile,
    questions: Sequence[VQAQuestion],
    collected: Collected,
    settings: dict[str, Any],
    *,
    strict: bool,
) -> MMReport:
    """Returns the report on answers.

    Args:
        name: of the file.
        file: what it holds.
        questions: what was asked, by unit.
        collected: the answers.
        settings: of the run, for JSON.
        strict: counts rows that failed as wrong; else they are left out.
    """
    asked = [questions[row.unit] for row in collected.rows]
    scored = [
        score(row.answer, question.answers) if row.answer is not None and question.answers else None
        for row, question in zip(collected.rows, asked, strict=True)
    ]
    points = _points(collected, asked, scored, strict)
    by_kind: dict[str, list[float]] = {}
    for kind, point in points:
        by_kind.setdefault(kind, []).append(point)
    every = [point for _, point in points]
    failed = failures(file.bad_rows, collected, {q.name: q.line for q in questions})
    values = {
        "questions": len(every),
        "accuracy": statistics.fmean(every) if every else None,
        "interval": _interval(every),
        "by_kind": {kind: {"questions": len(own), "accuracy": statistics.fmean(own)} for kind, own in sorted(by_kind.items()) if kind},
        "rows": len(collected.rows),
        "failed_rows": len(failed),
        **seconds(collected),
        **image_facts(collected, settings),
        "failures": [{"line": row.line, "index": row.index, "reason": row.reason} for row in failed],
        "unscored_rows": sum(not question.answers for question in asked),
        "without_ten_answers": sum(len(q.answers) not in (0, FULL_ANSWERS) for q in asked),
        "data": name,
        "scorer": "strict" if strict else "soft accuracy",
        "whole": collected.whole,
        "processes": collected.processes,
        "settings": settings,
        **collected.facts,
    }  # fmt: skip
    return MMReport(
        title=f"VQA: {settings['model']} on {name}",
        values=values,
        results=_results(collected, asked, scored),
        failed=failed,
        table=[],
        sections=_sections(values, collected, asked, scored),
        notes=[*_notes(values, len(questions)), *budget_notes(collected, values)],
        place=file.place,
    )


def _points(
    collected: Collected,
    asked: Sequence[VQAQuestion],
    scored: Sequence[Scored | None],
    strict: bool,
) -> list[tuple[str, float]]:
    """Returns kind and score of each question that counts."""
    found = []
    for row, question, own in zip(collected.rows, asked, scored, strict=True):
        if own is not None:
            found.append((question.kind, own.score))
        elif strict and question.answers and row.answer is None:
            found.append((question.kind, 0.0))
    return found


def _results(
    collected: Collected, asked: Sequence[VQAQuestion], scored: Sequence[Scored | None]
) -> list[dict[str, Any]]:
    return [
        {
            "index": question.name,
            "line": question.line,
            "kind": question.kind,
            "prompt": row.prompt,
            "answer": row.answer,
            "extracted": own and own.normal,
            "rule": own and own.rule,
            "answers": list(question.answers),
            "score": own and own.score,
            "reason": row.reason,
            "seconds": row.seconds,
            "image_tokens_read": row.image_tokens_read,
        }
        for row, question, own in zip(collected.rows, asked, scored, strict=True)
    ]


def _interval(points: Sequence[float]) -> tuple[float, float] | None:
    if len(points) < 2:
        return None
    mean, half = statistics.fmean(points), _Z95 * statistics.stdev(points) / math.sqrt(len(points))
    return max(0.0, mean - half), min(1.0, mean + half)


def _notes(values: dict[str, Any], total: int) -> list[str]:
    notes = []
    if values["without_ten_answers"]:
        notes.append(
            f"{values['without_ten_answers']} questions have not ten answers: one alone is compared exactly, over several the "
            "soft rule gives less than a point at most"
        )
    if values["unscored_rows"]:
        notes.append(f"{values['unscored_rows']} questions have no answer in the file: they were asked, and are in the results")  # fmt: skip
    if not values["whole"]:
        notes.append(f"not all questions are done: {values['rows']} of {total}")
    return notes


def _sections(
    values: dict[str, Any],
    collected: Collected,
    asked: Sequence[VQAQuestion],
    scored: Sequence[Scored | None],
) -> list[Section]:
    rows = [[kind, str(own["questions"]), f"{100 * own['accuracy']:.1f}"] for kind, own in values["by_kind"].items()]  # fmt: skip
    if values["accuracy"] is not None:
        rows.append(["all", str(values["questions"]), f"{100 * values['accuracy']:.1f}"])
    shown = [
        [question.name, question.question, row.answer or "", own.normal if own else "", ", ".join(dict.fromkeys(question.answers)), f"{own.score:.2f}" if own else ""]
        for row, question, own in zip(collected.rows, asked, scored, strict=True)
    ][:_SHOWN]  # fmt: skip
    title = "Rows" if len(asked) <= _SHOWN else f"The first {_SHOWN} rows"
    heads = ("id", "question", "answer", "compared as", "people said", "score")
    return [
        Section(title="Accuracy", heads=("", "questions", "accuracy %"), rows=rows),
        Section(title=title, heads=heads, rows=shown, is_long=True),
    ]
