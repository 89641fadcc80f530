"""Slow oracles of `oval_mm`: letters by scanning, groups by hand, soft accuracy one truth after another."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

REFUSALS = [
    "Sorry, I can't help with images of people yet.",
    "I can't process this file.",
    "I'm sorry, but without the image provided",
    "Cannot determine the answer",
]


def infer_slowly(answer: str, options: Mapping[str, str]) -> str | None:
    """The letter of an answer, letter by letter and word by word; None where nothing is found."""
    if "Failed to obtain answer via API" not in answer:
        if any(refusal in answer for refusal in REFUSALS):
            return "Z"
        words = _words(answer)
        seen = {word for word in words if word in options}
        if not seen and "Z" in words:
            return "Z"
        if len(seen) == 1:
            first = min(place for place, word in enumerate(words) if word in seen)
            if len(words) - first <= 4:
                return words[first]
    total = 0
    for text in options.values():
        total += len(text)
    lower = answer.lower()
    if len(lower) > 2 * total:
        return None
    inside = []
    for letter, text in options.items():
        wanted = text.lower()
        if any(lower[i : i + len(wanted)] == wanted for i in range(len(lower) + 1)):
            inside.append(letter)
    return inside[0] if len(inside) == 1 else None


def _words(text: str) -> list[str]:
    words, word = [], ""
    for letter in text + " ":
        if letter.isspace() or letter in ".()[],:;!*#{}":
            if word:
                words.append(word)
            word = ""
        else:
            word += letter
    return words


def circular_slowly(rows: Iterable[tuple[int, bool]]) -> tuple[int, int]:
    """Hits and questions of rows (index, hit): a question counts where its base row is there, and needs every row."""
    rows = list(rows)
    hits = questions = 0
    for index, _ in rows:
        if index < 1_000_000:
            questions += 1
            hits += all(hit for other, hit in rows if other % 1_000_000 == index)
    return hits, questions


def soft_accuracy_slowly(answer: str, truths: Sequence[str]) -> float:
    """Leave each truth out, count how many of the others say the same; texts are in their final form already."""
    points = []
    for place in range(len(truths)):
        others = [truth for other, truth in enumerate(truths) if other != place]
        points.append(min(1.0, sum(truth == answer for truth in others) / 3))
    return sum(points) / len(points)


def table_slowly(text: str) -> list[list[str]]:
    """Rows of a table as Python's csv module reads them, without blank lines."""
    return [row for row in csv.reader(io.StringIO(text, newline=""), delimiter="\t") if row]
