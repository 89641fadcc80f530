"""Verdicts on answers and what they add up to: vanilla and circular accuracy, by category, as VLMEvalKit reports them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oval_mm.extraction import NO_CHOICE, infer, infer_strictly
from oval_mm.mmbench import Question

__all__ = ["Figures", "Share", "Verdict", "figures", "judge", "table"]

ABBREVIATIONS = {
    "coarse_perception": "CP",
    "finegrained_perception (instance-level)": "FP-S",
    "finegrained_perception (cross-instance)": "FP-C",
    "logic_reasoning": "LR",
    "relation_reasoning": "RR",
    "attribute_reasoning": "AR",
}
"""Short names of MMBench's wider categories."""

_NO_SPLIT = "none"
_Z95 = 1.959964


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What became of one row.

    Attributes:
        question: the row.
        answer: the model's; None where it could not be asked.
        letter: what the answer means.
        rule: that said so; see `RULES`.
        hit: whether it is right; None where the file does not tell the answer.
    """

    question: Question
    answer: str | None
    letter: str
    rule: str
    hit: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """How many of some questions are right."""

    hits: int
    questions: int

    @property
    def accuracy(self) -> float:
        """The share, 0..1."""
        return self.hits / self.questions

    @property
    def interval(self) -> tuple[float, float]:
        """Where the true share lies with 95 % (Wilson), were the questions drawn at random."""
        n, p, z = self.questions, self.accuracy, _Z95
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        low = (
            max(0.0, middle - half) if self.hits else 0.0
        )  # rounding must not leave 0..1, nor the share
        return low, min(1.0, middle + half) if self.hits < n else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Accuracies; None where nothing was asked that tells.

    Attributes:
        vanilla: rows with options in their first order.
        vanilla_all: all rows, each for itself.
        circular: questions that are right in every order of their options.
        incomplete: questions that were not asked in every order.
        by: figures by value, by name of the grouping: `category`, `l2_category`, `split`.
        rules: rows by the rule that decided them.
    """

    vanilla: Share | None
    vanilla_all: Share | None
    circular: Share | None
    incomplete: int = 0
    by: Mapping[str, Mapping[str, Figures]]
    rules: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, ready for JSON."""
        return {
            "questions": self.vanilla.questions if self.vanilla else 0,
            **{name: share and share.accuracy for name, share in self._shares()},
            "intervals": {name: share and share.interval for name, share in self._shares()},
            "incomplete_groups": self.incomplete,
            **{f"by_{name}": {value: part.to_row() for value, part in own.items()} for name, own in self.by.items()},
            "rules": dict(self.rules),
        }  # fmt: skip

    def to_row(self) -> dict[str, Any]:
        """Returns the numbers alone."""
        shares = {name: share and share.accuracy for name, share in self._shares()}
        return {"questions": self.vanilla.questions if self.vanilla else 0, **shares}

    def _shares(self) -> list[tuple[str, Share | None]]:
        names = ("vanilla", "circular", "vanilla_all")
        return [(name, getattr(self, name)) for name in names]


def judge(question: Question, answer: str | None, *, strict: bool = False) -> Verdict:
    """Returns the verdict on an answer, alone for itself.

    Args:
        question: what was asked.
        answer: the model's; None where it could not be asked.
        strict: see `infer_strictly`.
    """
    if answer is None:
        hit = None if question.answer is None else False
        return Verdict(question=question, answer=None, letter=NO_CHOICE, rule="failed", hit=hit)
    found = (infer_strictly if strict else infer)(answer, question.options)
    letter = found.letter or NO_CHOICE
    hit = None if question.answer is None else letter == question.answer
    return Verdict(question=question, answer=answer, letter=letter, rule=found.rule, hit=hit)


def figures(verdicts: Sequence[Verdict], *, circular: bool, strict: bool = False) -> Figures:
    """Returns what verdicts add up to.

    Args:
        verdicts: of all rows that were tried.
        circular: whether questions are judged over all orders of their options.
        strict: counts rows that failed, and questions that lack an order, as wrong; else they are left out, as by
            VLMEvalKit, to which they would not be known.
    """
    known = _known(verdicts, strict)
    passed = _passes(known, strict) if circular else None
    getters: dict[str, Callable[[Question], str]] = {
        "category": lambda q: q.category,
        "l2_category": lambda q: q.l2_category,
        "split": lambda q: q.split,
    }
    by = {
        name: {
            value: _figures([v for v in known if get(v.question) == value], passed)
            for value in sorted({get(v.question) for v in known} - {""})
        }
        for name, get in getters.items()
    }
    incomplete = len(_incomplete(known)) if circular else 0
    rules = dict(Counter(verdict.rule for verdict in verdicts).most_common())
    return _figures(known, passed, incomplete, by, rules)


def table(
    verdicts: Sequence[Verdict], *, circular: bool, strict: bool = False
) -> list[dict[str, Any]]:
    """Returns the report in VLMEvalKit's form: a row a split, with Overall, the wider categories, the categories.

    Where a split has no question of a category, the value is None.
    """
    known = _known(verdicts, strict)
    passed = _passes(known, strict) if circular else None
    rows = [v for v in known if v.question.is_base] if circular else known
    hits = [(v.question, passed[v.question.group] if passed is not None else v.hit) for v in rows]
    found = []
    for split in sorted({question.split for question, _ in hits}):
        own = [(q, hit) for q, hit in hits if q.split == split]
        row: dict[str, Any] = {"split": split or _NO_SPLIT, "Overall": _mean(own)}
        for value in sorted({q.l2_category for q, _ in hits} - {""}):
            name = ABBREVIATIONS.get(value, value)
            row[name] = _mean([(q, hit) for q, hit in own if q.l2_category == value])
        for value in sorted({q.category for q, _ in hits} - {""}):
            row[value] = _mean([(q, hit) for q, hit in own if q.category == value])
        found.append(row)
    return found


def _known(verdicts: Sequence[Verdict], strict: bool) -> list[Verdict]:
    return [v for v in verdicts if v.hit is not None and (strict or v.answer is not None)]


def _passes(known: Sequence[Verdict], strict: bool) -> dict[int, bool]:
    """By question: whether it is right in every order."""
    passed: dict[int, bool] = {}
    for verdict in known:
        group = verdict.question.group
        passed[group] = passed.get(group, True) and bool(verdict.hit)
    if strict:
        passed.update(dict.fromkeys(_incomplete(known), False))
    return passed


def _incomplete(known: Sequence[Verdict]) -> list[int]:
    asked = Counter(v.question.group for v in known if v.answer is not None)
    return [
        v.question.group
        for v in known
        if v.question.is_base and asked[v.question.group] < len(v.question.options)
    ]


def _figures(
    known: Sequence[Verdict],
    passed: Mapping[int, bool] | None,
    incomplete: int = 0,
    by: Mapping[str, Mapping[str, Figures]] | None = None,
    rules: Mapping[str, int] | None = None,
) -> Figures:
    bases = [verdict for verdict in known if verdict.question.is_base]
    return Figures(
        vanilla=_share([bool(verdict.hit) for verdict in bases]),
        vanilla_all=_share([bool(verdict.hit) for verdict in known]),
        circular=None
        if passed is None
        else _share([passed[verdict.question.group] for verdict in bases]),
        incomplete=incomplete,
        by=by or {},
        rules=rules or {},
    )


def _share(hits: Sequence[bool]) -> Share | None:
    return Share(hits=sum(hits), questions=len(hits)) if hits else None


def _mean(hits: Sequence[tuple[Question, bool | None]]) -> float | None:
    return sum(bool(hit) for _, hit in hits) / len(hits) if hits else None
