"""Answers under budgets of image tokens: rows on disk, and what they add up to against dense. Asks nothing itself."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oval_adapters.evaluation.kept_rows import KeptRows
from oval_mm.mmbench import Question
from oval_mm.mmbench_report import Share
from oval_mm.paired import paired

DENSE = "dense"
DOWNSAMPLE = "downsample"
_DRAWS = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One way to read images.

    Attributes:
        router: its label; `dense` reads all, `downsample` reads all of coarser pictures.
        budget: share of the image tokens.
        digest: of a trained router's weights; empty for others.
    """

    router: str
    budget: float = 1.0
    digest: str = ""

    @property
    def key(self) -> str:
        """Names it in rows."""
        return f"{self.router}{self.digest and '#'}{self.digest}@{self.budget:g}"

    @property
    def is_routed(self) -> bool:
        """Whether pages are chosen."""
        return self.router not in (DENSE, DOWNSAMPLE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A question of a table, in one order of its options.

    Attributes:
        unit: its number in the run.
        table: name of the table.
        question: what is asked, and the right answer.
    """

    unit: int
    table: str
    question: Question


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerRow:
    """One question under one setting.

    Attributes:
        unit: of the question.
        setting: key of the setting.
        answer: of the model; None where it could not be asked.
        hit: whether it is right.
        reason: why it could not be asked.
        ms: from pictures in memory to the text of the answer.
        router_ms: of these, for choosing pages.
        image_tokens: of the prompt.
        image_tokens_read: of these, what the decoder read.
    """

    unit: int
    setting: str
    answer: str | None
    hit: bool
    reason: str | None
    ms: float
    router_ms: float
    image_tokens: int
    image_tokens_read: int

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, ready for JSON."""
        return asdict(self)


class AnswersOnDisk(KeptRows):
    """Rows in a folder, a line a question and setting; several processes write a file each."""

    def __init__(self, folder: Path, stamp: str, part: int) -> None:
        super().__init__(folder, stamp, resume=True, rank=part)
        self._rows_folder = folder

    def read(self) -> dict[tuple[int, str], AnswerRow]:
        """Returns the rows of all processes. A line that was cut off does not count."""
        rows = {}
        for path in sorted(self._rows_folder.glob("rows-*.jsonl")):
            for line in path.read_bytes().split(b"\n")[:-1]:
                row = AnswerRow(**json.loads(line))
                rows[row.unit, row.setting] = row
        return rows


def summarise(
    asked: Sequence[Asked], settings: Sequence[Setting], rows: Mapping[tuple[int, str], AnswerRow]
) -> list[dict[str, Any]]:
    """Returns what each table gave, by setting; questions that some setting lacks, or that failed, are left out."""
    tables = []
    for name in dict.fromkeys(own.table for own in asked):
        whole = [own for own in asked if own.table == name and _is_whole(own, settings, rows)]
        tried = sum(own.table == name for own in asked)
        if whole:
            tables.append(_table(name, whole, settings, rows) | {"left_out": tried - len(whole)})
    return tables


def _is_whole(
    own: Asked, settings: Sequence[Setting], rows: Mapping[tuple[int, str], AnswerRow]
) -> bool:
    found = [rows.get((own.unit, setting.key)) for setting in settings]
    return all(row is not None and row.answer is not None for row in found)


def _table(
    name: str,
    asked: Sequence[Asked],
    settings: Sequence[Setting],
    rows: Mapping[tuple[int, str], AnswerRow],
) -> dict[str, Any]:
    columns = {s.key: [rows[own.unit, s.key] for own in asked] for s in settings}
    base = [place for place, own in enumerate(asked) if own.question.is_base]
    dense = columns[next(s.key for s in settings if s.router == DENSE)]
    lines = []
    for setting in settings:
        own = columns[setting.key]
        rivals = {
            s.router: columns[s.key]
            for s in settings
            if s.key != setting.key and (s.router == DENSE or s.budget == setting.budget)
        }
        lines.append(
            {
                "router": setting.router,
                "budget": setting.budget,
                **_accuracy([own[i] for i in base], [dense[i] for i in base]),
                "circular": _circular(asked, own),
                "against": {
                    rival: paired((own[i].hit, other[i].hit) for i in base).to_dict()
                    for rival, other in rivals.items()
                },
                **_times(own, dense),
                "read_share": sum(r.image_tokens_read for r in own)
                / max(1, sum(r.image_tokens for r in own)),
                "by_task": _by_task(asked, own, base),
            }
        )
    return {
        "name": name,
        "questions": len(base),
        "asked": len(asked),
        "pictures": statistics.fmean(len(own.question.pictures) for own in asked),
        "image_tokens": statistics.fmean(row.image_tokens for row in dense),
        "rows": lines,
    }


def _accuracy(own: Sequence[AnswerRow], dense: Sequence[AnswerRow]) -> dict[str, Any]:
    share = Share(hits=sum(row.hit for row in own), questions=len(own))
    hits = np.array([[row.hit, other.hit] for row, other in zip(own, dense, strict=True)], float)
    all_dense = hits[:, 1].sum()

    def ratio(drawn: np.ndarray) -> float:
        right = drawn[:, 1].sum()
        return float(drawn[:, 0].sum() / right) if right else float("nan")

    return {
        "accuracy": share.accuracy,
        "interval": list(share.interval),
        "relative": ratio(hits) if all_dense else None,
        "relative_interval": _bootstrap(hits, ratio) if all_dense else None,
    }


def _times(own: Sequence[AnswerRow], dense: Sequence[AnswerRow]) -> dict[str, Any]:
    ratios = np.array([row.ms / other.ms for row, other in zip(own, dense, strict=True)])
    return {
        "ms": statistics.median(row.ms for row in own),
        "ratio": float(np.median(ratios)),
        "ratio_interval": _bootstrap(ratios, lambda drawn: float(np.median(drawn))),
        "router_share": statistics.median(row.router_ms / row.ms for row in own),
    }


def _bootstrap(values: np.ndarray, measure: Callable[[np.ndarray], float]) -> list[float]:
    """Returns where a measure lies with 95 %, over draws of the questions."""
    rng = np.random.default_rng(0)
    found = [measure(values[rng.integers(0, len(values), len(values))]) for _ in range(_DRAWS)]
    return [float(np.nanpercentile(found, at)) for at in (2.5, 97.5)]


def _circular(asked: Sequence[Asked], rows: Sequence[AnswerRow]) -> float | None:
    """Returns the share of questions that are right in every order; None where one order only was asked."""
    groups: dict[int, list[bool]] = {}
    for own, row in zip(asked, rows, strict=True):
        groups.setdefault(own.question.group, []).append(row.hit)
    if all(len(own) == 1 for own in groups.values()):
        return None
    return statistics.fmean(all(own) for own in groups.values())


def _by_task(
    asked: Sequence[Asked], rows: Sequence[AnswerRow], base: Iterable[int]
) -> dict[str, float]:
    tasks: dict[str, list[bool]] = {}
    for place in base:
        tasks.setdefault(asked[place].question.category, []).append(rows[place].hit)
    return {task: statistics.fmean(hits) for task, hits in tasks.items()}
