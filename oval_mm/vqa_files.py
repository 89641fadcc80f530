"""Reads questions with short answers: VQAv2's two files, TextVQA's one, rows of JSON, or a table. Scores nothing.

Images are base64 text in the row, or files below one folder; a name that leads out of the folder is refused.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oval_core.errors import ConfigError
from oval_mm.pictures import Pictures
from oval_mm.tsv import BadRow, records
from oval_mm.vqa_answers import FULL_ANSWERS

__all__ = ["VQAFile", "VQAQuestion", "read_vqa"]

_MIN_BASE64 = 256
"""A text of `image` that is longer cannot be a file's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VQAQuestion:
    """One question.

    Attributes:
        line: of the file, from 1; in a whole JSON file its place in the list, from 1.
        name: its id.
        question: text.
        answers: what people said; empty where the file does not tell.
        kind: its type of answer or category; empty where there is none.
        picture: name of its image among `pictures`, or a file.
    """

    line: int
    name: str
    question: str
    answers: tuple[str, ...]
    kind: str
    picture: str | Path


@dataclass(frozen=True, kw_only=True, slots=True)
class VQAFile:
    """What a file holds.

    Attributes:
        questions: in the order of the file.
        bad_rows: what cannot be asked.
        pictures: images that came in the file.
        place: what `line` counts, for messages: `line`, or `entry` of a list in a whole JSON file.
    """

    questions: Sequence[VQAQuestion]
    bad_rows: Sequence[BadRow]
    pictures: Pictures
    place: str = "line"


class _RowError(ValueError):
    """Why a row cannot be used."""


def read_vqa(
    path: str | Path,
    *,
    annotations: str | Path | None = None,
    images: str | Path | None = None,
    strict: bool = False,
) -> VQAFile:
    """Reads a file of questions: `.jsonl`, `.json` or `.tsv`.

    A row has `question` (or `text`), `answers` (texts, or objects with `answer`) or one `answer`, `image` (a file's name
    or base64) or `image_id`, and an id: `question_id`, `id` or `index`.

    Args:
        path: of the file.
        annotations: VQAv2's file of answers.
        images: folder of the images; None takes the file's own folder.
        strict: refuses a file with bad rows, or with rows that have not ten answers.

    Raises:
        ConfigError: a file is absent or of no known form, or no row can be asked; strictly, a bad row.
    """
    path = Path(path).expanduser()
    folder = Path(images).expanduser() if images is not None else path.parent
    if not folder.is_dir():
        raise ConfigError(f"images: no folder {folder}. Allowed: an existing one. Check the path.")
    truths = {} if annotations is None else _annotations(Path(annotations).expanduser())
    place = "entry" if path.suffix == ".json" else "line"
    reader = _Reader(folder.resolve(), truths, strict, place)
    rows, subtype = _rows(path)
    reader.read(rows, subtype)
    bad, what = reader.bad, "none with --strict" if strict else "at least one good row"
    if not reader.questions or (strict and bad):
        first = f", the first {place} {bad[0].line}: {bad[0].reason}" if bad else ""
        raise ConfigError(
            f"data: {path.name} has {len(reader.questions)} good and {len(bad)} bad rows{first}. Allowed: {what}. Mend the file."
        )
    return VQAFile(questions=reader.questions, bad_rows=bad, pictures=reader.pictures, place=place)


class _Reader:
    """Makes questions of rows, whatever form these came in."""

    def __init__(self, folder: Path, truths: Mapping[str, Any], strict: bool, place: str) -> None:
        self._folder, self._truths, self._strict = folder, truths, strict
        self._place = place
        self._names: dict[str, int] = {}
        self.questions: list[VQAQuestion] = []
        self.bad: list[BadRow] = []
        self.pictures = Pictures()

    def read(self, rows: Iterator[tuple[int, Any] | BadRow], subtype: str) -> None:
        for row in rows:
            if isinstance(row, BadRow):
                self.bad.append(row)
                continue
            line, cells = row
            try:
                self.questions.append(self._question(line, cells, subtype))
            except _RowError as error:
                self.bad.append(
                    BadRow(line=line, index=_name(cells)[:40], reason=_printable(str(error)))
                )

    def _question(self, line: int, cells: Any, subtype: str) -> VQAQuestion:
        if not isinstance(cells, dict):
            raise _RowError("is no object")
        name = _name(cells) or str(line)
        if name in self._names:
            raise _RowError(f"id {name[:40]} is on {self._place} {self._names[name]} already")
        question = cells.get("question", cells.get("text"))
        if not isinstance(question, str) or not question.strip():
            raise _RowError("no question")
        if _printable(question) != question:
            raise _RowError("the question has a lone surrogate, which no tokenizer takes")
        known = self._truths.get(name, cells)
        answers = _answers(known)
        if self._truths and name not in self._truths:
            raise _RowError("no answer among the annotations")
        if self._strict and len(answers) != FULL_ANSWERS:
            raise _RowError(f"{len(answers)} answers, strictly {FULL_ANSWERS}")
        picture = self._picture(cells, subtype)
        self._names[name] = line
        kind = known.get("answer_type") or cells.get("category") or ""
        return VQAQuestion(line=line, name=name, question=question, answers=answers, kind=str(kind), picture=picture)  # fmt: skip

    def _picture(self, cells: Mapping[str, Any], subtype: str) -> str | Path:
        image = cells.get("image")
        if isinstance(image, str) and (len(image) > _MIN_BASE64 or image.startswith("data:")):
            return self.pictures.add(image)
        if isinstance(image, str) and image:
            names = [image]
        elif isinstance(number := cells.get("image_id"), int):
            names = [f"COCO_{subtype}_{number:012d}.jpg", f"{number:012d}.jpg", f"{number}.jpg"]
        elif isinstance(number, str) and number:
            names = [f"{number}.jpg", f"{number}.png"]
        else:
            raise _RowError("no image and no image_id")
        for name in names:
            found = self._inside(name)
            if found is not None:
                return found
        raise _RowError(f"no image {names[0][:80]!r} below the folder of images")

    def _inside(self, name: str) -> Path | None:
        try:
            path = (self._folder / name).resolve()
            return path if path.is_relative_to(self._folder) and path.is_file() else None
        except (OSError, ValueError):  # a name too long, or with a NUL
            return None


def _name(cells: Any) -> str:
    """Returns the id of a row; nothing if it has none."""
    if not isinstance(cells, dict):
        return ""
    keys = ("question_id", "id", "index")
    return next((_printable(str(cells[key])) for key in keys if cells.get(key) is not None), "")


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _answers(cells: Any) -> tuple[str, ...]:
    found = cells.get("answers", cells.get("answer")) if isinstance(cells, dict) else None
    if found is None or found == "":
        return ()
    if isinstance(found, str) and found.startswith("[") and found.endswith("]"):
        try:
            found = ast.literal_eval(found)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise _RowError("answers are a list that cannot be read") from error
    listed = found if isinstance(found, list) else [found]
    texts = [part.get("answer") if isinstance(part, dict) else part for part in listed]
    if not all(isinstance(text, str | int | float) for text in texts):
        raise _RowError("answers are no texts")
    return tuple(map(str, texts))


def _annotations(path: Path) -> dict[str, Any]:
    data = _json(path, "annotations")
    rows = data.get("annotations") if isinstance(data, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(
            f"annotations: {path.name} is no file of VQAv2's answers. Allowed: an object with a list `annotations`. "
            "Check the path."
        )
    return {str(row.get("question_id")): row for row in rows}


def _rows(path: Path) -> tuple[Iterator[tuple[int, Any] | BadRow], str]:
    """Returns the rows of a file, and VQAv2's name for its images."""
    if path.suffix == ".tsv":
        return _table_rows(_bytes(path, "data")), ""
    if path.suffix == ".jsonl":
        return _json_rows(_bytes(path, "data")), ""
    data = _json(path, "data")
    rows = data
    if isinstance(data, dict):
        rows = data.get("questions", data.get("data"))
    if path.suffix != ".json" or not isinstance(rows, list):
        raise ConfigError(
            f"data: got {path.name}. Allowed: .jsonl or .tsv with a question a row, or .json with a list, `questions` or "
            "`data`. Check the path."
        )
    subtype = str(data.get("data_subtype", "")) if isinstance(data, dict) else ""
    return iter(enumerate(rows, start=1)), subtype


def _table_rows(lines: Sequence[bytes]) -> Iterator[tuple[int, Any] | BadRow]:
    names: tuple[str, ...] | None = None
    for row in records(lines):
        if isinstance(row, BadRow):
            yield row
        elif names is None:
            names = tuple(name.strip().lower() for name in row.fields)
        elif len(row.fields) > len(names):
            reason = f"{len(row.fields)} fields, and {len(names)} columns"
            yield BadRow(line=row.line, index=row.fields[0][:40], reason=reason)
        else:
            yield row.line, dict(zip(names, row.fields, strict=False))


def _json_rows(lines: Sequence[bytes]) -> Iterator[tuple[int, Any] | BadRow]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                row: tuple[int, Any] | BadRow = (number, json.loads(line))
            except (ValueError, RecursionError) as error:
                row = BadRow(line=number, index="", reason=f"not JSON: {error}"[:200])
            yield row


def _json(path: Path, what: str) -> Any:
    try:
        return json.loads(b"".join(_bytes(path, what)))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what}: {path.name} is not JSON: {error}. Allowed: JSON. Mend it.") from error  # fmt: skip


def _bytes(path: Path, what: str) -> list[bytes]:
    try:
        with path.open("rb") as lines:
            return list(lines)
    except OSError as error:
        raise ConfigError(
            f"{what}: cannot read {path}: {error.strerror}. Allowed: a file. Check the path."
        ) from error
