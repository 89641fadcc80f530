"""Reads MMBench's table: questions with their options and images, and rows that cannot be used. Scores nothing."""

from __future__ import annotations

import ast
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from oval_core.errors import ConfigError
from oval_mm.pictures import Pictures
from oval_mm.tsv import BadRow, Record, records

__all__ = ["PASS_STEP", "MMBenchFile", "Question", "read_mmbench", "roll"]

PASS_STEP = 1_000_000
"""Row `index + k * PASS_STEP` asks question `index` again, its options moved on by k letters."""

MAX_REFERENCE = 64
"""An `image` of at most so many characters is the index of the row that has the image."""

MISSING = frozenset(
    ["#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"]
)  # fmt: skip
"""Texts that pandas, and so VLMEvalKit, reads as nothing; strictly, only an empty field is nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One row.

    Attributes:
        line: of the file, from 1.
        index: its own.
        group: index of the question that it asks, in whatever order of options.
        question: text.
        hint: None where there is none.
        options: text by letter.
        answer: letter; None where the file does not tell (MMBench's test split).
        category: empty where there is none, as the next two.
        l2_category: the wider one.
        split: of the data.
        pictures: names of its images.
    """

    line: int
    index: int
    group: int
    question: str
    hint: str | None
    options: Mapping[str, str]
    answer: str | None
    category: str
    l2_category: str
    split: str
    pictures: tuple[str, ...]

    @property
    def is_base(self) -> bool:
        """Whether its options stand in their first order."""
        return self.index == self.group


@dataclass(frozen=True, kw_only=True, slots=True)
class MMBenchFile:
    """What a file holds.

    Attributes:
        questions: in the order of the file.
        bad_rows: what cannot be asked.
        pictures: images, by the names in the questions.
    """

    questions: Sequence[Question]
    bad_rows: Sequence[BadRow]
    pictures: Pictures

    @property
    def is_rolled(self) -> bool:
        """Whether questions come again with their options moved on."""
        return not all(question.is_base for question in self.questions)


class _RowError(ValueError):
    """Why a row cannot be used."""


def read_mmbench(path: str | Path, *, strict: bool = False) -> MMBenchFile:
    """Reads a file in MMBench's form: columns `index`, `question`, `image`, `A`, `B` ...; the others may be absent.

    Args:
        path: of the file.
        strict: refuses a file with bad rows, and takes texts such as "None" for what they say.

    Raises:
        ConfigError: no such file, no such table, or no row that can be asked; strictly, a bad row.
    """
    path = Path(path).expanduser()
    reader = _Reader(strict)
    try:
        with path.open("rb") as lines:
            reader.read(path, records(lines))
    except OSError as error:
        raise ConfigError(
            f"data: cannot read {path}: {error.strerror}. Allowed: a .tsv of MMBench's form. Check the path."
        ) from error
    found = reader.finish()
    bad = found.bad_rows
    if bad and (strict or not found.questions):
        first = f"line {bad[0].line}: {bad[0].reason}"
        raise ConfigError(
            f"data: {path.name} has {len(bad)} bad rows, the first {first}. Allowed: "
            f"{'none with --strict' if strict else 'at least one good row'}. Mend the file."
        )
    if not found.questions:
        raise ConfigError(
            f"data: {path.name} has no row. Allowed: a question a row. Check the path."
        )
    return found


def roll(questions: Sequence[Question]) -> Iterator[Question]:
    """Yields each question, then the same with its options moved on by one letter, by two, and so on round.

    Each text moves to the next letter, the last one to A, as MMBench's own rolled rows have it.
    """
    for question in questions:
        letters = list(question.options)
        for step in range(len(letters)):
            moved = {letters[place]: letters[place - step] for place in range(len(letters))}
            options = {letter: question.options[source] for letter, source in moved.items()}
            answer = next((to for to, source in moved.items() if source == question.answer), None)
            index = question.index + step * PASS_STEP
            yield replace(question, index=index, options=options, answer=answer)


@dataclass(frozen=True, slots=True)
class _Row:
    line: int
    cells: Mapping[str, str]
    index: int


class _Reader:
    """Takes rows in; questions are made at the end, since a row may refer to the image of a later one."""

    def __init__(self, strict: bool) -> None:
        self._missing = frozenset() if strict else MISSING
        self._pictures = Pictures()
        self._rows: list[_Row] = []
        self._bad: list[BadRow] = []
        self._lines: dict[int, int] = {}
        self._images: dict[int, tuple[str, ...] | int] = {}

    def read(self, path: Path, rows: Iterator[Record | BadRow]) -> None:
        header = next((row for row in rows if isinstance(row, Record)), None)
        names = () if header is None else tuple(map(_column, header.fields))
        lacking = [name for name in ("index", "question", "image", "A") if name not in names]
        if lacking:
            raise ConfigError(
                f"data: {path.name} lacks the columns {', '.join(lacking)}. Allowed: index, question, image (base64), A, B "
                "..., hint, answer, category, l2-category, split, tab-separated. Give such a file."
            )
        for row in rows:
            if isinstance(row, BadRow):
                self._bad.append(row)
                continue
            cells = (
                {} if len(row.fields) > len(names) else dict(zip(names, row.fields, strict=False))
            )
            try:
                if not cells:
                    raise _RowError(f"{len(row.fields)} fields, and {len(names)} columns")
                self._add(row.line, cells)
            except _RowError as error:
                self._refuse(row.line, cells, error)

    def finish(self) -> MMBenchFile:
        questions = []
        for row in self._rows:
            try:
                questions.append(self._question(row))
            except _RowError as error:
                self._refuse(row.line, row.cells, error)
        bad = sorted(self._bad, key=lambda row: row.line)
        return MMBenchFile(questions=questions, bad_rows=bad, pictures=self._pictures)

    def _refuse(self, line: int, cells: Mapping[str, str], error: _RowError) -> None:
        index = cells.get("index", "")[:40]
        self._bad.append(BadRow(line=line, index=index, reason=str(error)))

    def _add(self, line: int, cells: dict[str, str]) -> None:
        index = _whole_number("index", cells.get("index", ""))
        if index in self._lines:
            raise _RowError(f"index {index} is on line {self._lines[index]} already")
        self._lines[index] = line
        image = cells.pop("image", "")
        if not self._has(image):
            raise _RowError("no image")
        if len(image) <= MAX_REFERENCE:
            self._images[index] = _whole_number("image", image)
        else:
            self._images[index] = tuple(map(self._pictures.add, _images(image)))
        self._rows.append(_Row(line, cells, index))

    def _question(self, row: _Row) -> Question:
        cells = {name: text for name, text in row.cells.items() if self._has(text)}
        options = {letter: cells[letter] for letter in string.ascii_uppercase if letter in cells}
        if "question" not in cells:
            raise _RowError("no question")
        if not options:
            raise _RowError("no option")
        answer = cells.get("answer")
        if answer is not None and answer not in options:
            raise _RowError(f"answer {answer[:20]!r} is none of the options {', '.join(options)}")
        group = row.index % PASS_STEP
        if "g_index" in cells:
            group = _whole_number("g_index", cells["g_index"])
        return Question(
            line=row.line,
            index=row.index,
            group=group,
            question=cells["question"],
            hint=cells.get("hint"),
            options=options,
            answer=answer,
            category=cells.get("category", ""),
            l2_category=cells.get("l2-category", ""),
            split=cells.get("split", ""),
            pictures=self._images_of(row.index),
        )

    def _images_of(self, index: int) -> tuple[str, ...]:
        own = self._images[index]
        if not isinstance(own, int):
            return own
        other = self._images.get(own)
        if not isinstance(other, tuple):
            what = (
                "which refers to another row"
                if isinstance(other, int)
                else "which is no row with an image"
            )
            raise _RowError(f"image refers to row {own}, {what}")
        return other

    def _has(self, text: str) -> bool:
        return text != "" and text not in self._missing


def _column(name: str) -> str:
    name = name.strip()
    return name if len(name) == 1 and name.isupper() else name.lower()


def _whole_number(name: str, text: str) -> int:
    whole, _, rest = text.strip().partition(".")
    if not (whole.isascii() and whole.isdecimal() and len(whole) < 16) or rest.strip("0"):
        raise _RowError(f"{name} {text[:40]!r} is no whole number from 0 up to {10**15 - 1}")
    return int(whole)


def _images(text: str) -> list[str]:
    """Returns the images of a field: one, or several as a list in Python's or JSON's form."""
    if not (text.startswith("[") and text.endswith("]")):
        return [text]
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise _RowError("image is a list that cannot be read") from error
    if not found or not all(isinstance(image, str) for image in found):
        raise _RowError("image is a list, but not of images")
    return list(found)
