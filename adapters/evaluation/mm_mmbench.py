"""MMBench: what a file's questions become when they are asked, and the report on the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from oval_core.errors import ConfigError
from oval_mm.extraction import RULES
from oval_mm.mmbench import MMBenchFile, Question, roll
from oval_mm.mmbench_report import Figures, Share, Verdict, figures, judge, table
from oval_mm.prompts import choice_prompt

__all__ = ["Plan", "make_plan", "mmbench_report"]

_SHOWN = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is asked.

    Attributes:
        name: of the file.
        file: what it holds.
        questions: rows to ask, in order.
        circular: whether every order of the options is asked.
        was_rolled_here: whether the orders were made here, since the file has none.
        style: of the prompts.
        strict: see `oval_mm.extraction.infer_strictly`.
    """

    name: str
    file: MMBenchFile
    questions: Sequence[Question]
    circular: bool
    was_rolled_here: bool
    style: str
    strict: bool

    def asks(self) -> list[Ask]:
        """Returns the rows as questions to a model."""
        return [
            Ask(
                name=str(q.index),
                label=q.category or "questions",
                text=choice_prompt(q.question, q.hint, q.options, self.style),
                pictures=q.pictures,
                load=self.file.pictures.load,
            )
            for q in self.questions
        ]


def make_plan(
    name: str,
    file: MMBenchFile,
    *,
    circular: bool | None = None,
    limit: int | None = None,
    style: str = "llava",
    strict: bool = False,
) -> Plan:
    """Chooses the rows to ask.

    Args:
        name: of the file.
        file: what it holds.
        circular: whether every order of the options is asked; None asks what the file has. A file without rolled rows is
            rolled here.
        limit: only the first so many questions, with all their orders.
        style: of the prompts.
        strict: how answers are judged.

    Raises:
        ConfigError: a limit below 1, or nothing to ask.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit: got {limit}. Allowed: 1 or more. Give such a number.")
    is_circular = file.is_rolled if circular is None else circular
    bases = [question for question in file.questions if question.is_base]
    if not bases:
        raise ConfigError(
            f"data: {name} has only rows with options moved on. Allowed: also rows in the first order. Mend the file."
        )
    groups = {question.group for question in bases[:limit]}
    rolls = is_circular and not file.is_rolled
    if rolls:
        questions = list(roll(bases[:limit]))
    else:
        known = file.questions if is_circular else bases
        questions = [question for question in known if question.group in groups]
    return Plan(
        name=name,
        file=file,
        questions=questions,
        circular=is_circular,
        was_rolled_here=rolls,
        style=style,
        strict=strict,
    )


def mmbench_report(plan: Plan, collected: Collected, settings: dict[str, Any]) -> MMReport:
    """Returns the report on answers; they are judged here, so another scorer needs no new run.

    Args:
        plan: what was asked.
        collected: the answers.
        settings: of the run, for JSON.
    """
    verdicts = [
        judge(plan.questions[row.unit], row.answer, strict=plan.strict) for row in collected.rows
    ]
    found = figures(verdicts, circular=plan.circular, strict=plan.strict)
    lines = {str(question.index): question.line for question in plan.questions}
    failed = failures(plan.file.bad_rows, collected, lines)
    values = {
        **found.to_dict(),
        "rows": len(collected.rows),
        "failed_rows": len(failed),
        **seconds(collected),
        **image_facts(collected, settings),
        "failures": [{"line": row.line, "index": row.index, "reason": row.reason} for row in failed],
        "unscored_rows": sum(verdict.hit is None for verdict in verdicts),
        "data": plan.name,
        "prompt": plan.style,
        "scorer": "strict" if plan.strict else "vlmevalkit",
        "rolled_here": plan.was_rolled_here,
        "whole": collected.whole,
        "processes": collected.processes,
        "settings": settings,
        **collected.facts,
    }  # fmt: skip
    return MMReport(
        title=f"MMBench: {settings['model']} on {plan.name}",
        values=values,
        results=_results(collected, verdicts),
        failed=failed,
        table=table(verdicts, circular=plan.circular, strict=plan.strict),
        sections=_sections(found, verdicts),
        notes=[*_notes(plan, found, values), *budget_notes(collected, values)],
    )


def _results(collected: Collected, verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    return [
        {
            "index": verdict.question.index,
            "group": verdict.question.group,
            "line": verdict.question.line,
            "category": verdict.question.category,
            "prompt": row.prompt,
            "options": dict(verdict.question.options),
            "answer": row.answer,
            "extracted": verdict.letter,
            "rule": verdict.rule,
            "right": verdict.question.answer,
            "hit": verdict.hit,
            "reason": row.reason,
            "seconds": row.seconds,
            "image_tokens_read": row.image_tokens_read,
        }
        for row, verdict in zip(collected.rows, verdicts, strict=True)
    ]


def _notes(plan: Plan, found: Figures, values: dict[str, Any]) -> list[str]:
    notes = []
    if plan.was_rolled_here:
        notes.append("the file has no rolled rows: the orders of the options were made here")
    if found.incomplete:
        what = "wrong" if plan.strict else "judged by the orders that were asked, as by VLMEvalKit"
        notes.append(f"{found.incomplete} questions were not asked in every order; they count as {what}")  # fmt: skip
    if values["unscored_rows"]:
        notes.append(f"{values['unscored_rows']} rows have no right answer in the file: they were asked, and are in the results")  # fmt: skip
    if not values["whole"]:
        notes.append(f"not all rows are done: {values['rows']} of {len(plan.questions)}")
    return notes


def _sections(found: Figures, verdicts: Sequence[Verdict]) -> list[Section]:
    heads = ("", "questions", "accuracy %", "95 %")
    named = {
        "circular: right in every order": found.circular,
        "vanilla: first order": found.vanilla,
        "every row for itself": found.vanilla_all,
    }
    rows = [[name, str(share.questions), f"{100 * share.accuracy:.1f}", _interval(share)] for name, share in named.items() if share]  # fmt: skip
    sections = [Section(title="Accuracy", heads=heads, rows=rows)]
    for name, title in (("l2_category", "By wider category"), ("category", "By category"), ("split", "By split")):  # fmt: skip
        own = found.by[name]
        if len(own) > 1:
            lines = [[value, str(part.to_row()["questions"]), _percent(part.vanilla), _percent(part.circular)] for value, part in own.items()]  # fmt: skip
            heads = ("", "questions", "vanilla %", "circular %")
            sections.append(Section(title=title, heads=heads, rows=lines))
    rules = [[rule, str(count), RULES[rule]] for rule, count in found.rules.items()]
    sections.append(Section(title="Rules that decided", heads=("", "rows", "meaning"), rows=rules, is_long=True))  # fmt: skip
    shown = [
        [str(v.question.index), v.question.question, v.answer or "", v.letter, v.rule, v.question.answer or "", {True: "yes", False: "no", None: ""}[v.hit]]
        for v in verdicts[:_SHOWN]
    ]  # fmt: skip
    title = "Rows" if len(verdicts) <= _SHOWN else f"The first {_SHOWN} rows"
    heads = ("index", "question", "answer", "letter", "rule", "right", "hit")
    return [*sections, Section(title=title, heads=heads, rows=shown, is_long=True)]


def _interval(share: Share) -> str:
    low, high = share.interval
    return f"{100 * low:.1f}-{100 * high:.1f}"


def _percent(share: Share | None) -> str:
    return "" if share is None else f"{100 * share.accuracy:.1f}"
