"""Answers about images, a row a question: plain values that survive a file, and the files that keep them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from oval_adapters.evaluation.kept_rows import KeptRows
from oval_core.errors import ConfigError

__all__ = ["AnswerRow", "KeptAnswers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerRow:
    """One question that was tried.

    Attributes:
        unit: its number in the run.
        name: its index or id in the file.
        prompt: what the model was asked, in its template; an image token stands for all tokens of an image.
        answer: of the model; None where it could not be asked.
        reason: why it could not; None where it could.
        seconds: for images, prompt and answer.
        image_tokens: that its images have; None where it could not be asked.
        image_tokens_read: of these, what the decoder read.
        image_pages: that its images have; None where all are read.
    """

    unit: int
    name: str
    prompt: str
    answer: str | None
    reason: str | None
    seconds: float
    image_tokens: int | None = None
    image_tokens_read: int | None = None
    image_pages: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AnswerRow:
        """Builds the row from `to_dict`'s values."""
        return cls(**values)


class KeptAnswers(KeptRows):
    """Answers in a folder, a line each. The names of its files never come from the data."""

    def read(self) -> list[AnswerRow]:  # type: ignore[override]
        """Returns the rows of all processes, by unit. A line that was cut off does not count."""
        rows: dict[int, AnswerRow] = {}
        for path in sorted(self._folder.glob("rows-*.jsonl")):
            whole = path.read_bytes().split(b"\n")[:-1]
            for number, line in enumerate(whole, start=1):
                try:
                    row = AnswerRow.from_dict(json.loads(line))
                except (ValueError, TypeError) as error:
                    raise ConfigError(
                        f"out: line {number} of {path} cannot be read: {error}. Allowed: rows of such a run. Remove the "
                        "line, and its question is asked again."
                    ) from error
                rows[row.unit] = row
        return [rows[unit] for unit in sorted(rows)]
