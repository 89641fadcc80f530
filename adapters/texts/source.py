"""Reads a file of texts: running text, questions with answers, turns, or key-value lists. Knows no tokens."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oval_core.errors import ConfigError

FIELDS = "text; question and answer; turns; ordered_kv_records"

_WIKITEXT_ESCAPE = re.compile(r" @([-,.])@ ")
_CALCULATOR = re.compile(r"<<[^<>]*>>")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\s*\n\s*")
_SHORTEST_SENTENCE = 20
_REPLIES = (
    "I see. Please go on.",
    "Thank you, I have read it. What else would you like to know?",
    "All right. I will keep that in mind for the next question.",
)

Dialogue = tuple[str, ...]
"""Turns: the user's and the assistant's in alternation, an even number."""
Records = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Source:
    """What a file holds, in the forms that passages are made of.

    Attributes:
        name: of the file, for messages.
        text: all of it as running text.
        dialogues: all of it as turns.
        records: its key-value lists, if any.
    """

    name: str
    text: str
    dialogues: tuple[Dialogue, ...]
    records: tuple[Records, ...] = ()


def read_source(path: str | Path) -> Source:
    """Reads a file: `.jsonl` holds one object a line, anything else is running text; both may end in `.gz`.

    WikiText's escapes (` @-@ `) and GSM8K's calculator notes (`<<1+1=2>>`) are undone. Where a file has user turns
    without answers, short replies stand in; running text becomes turns sentence by sentence.

    Raises:
        ConfigError: no such file, not UTF-8, no text in it, or a line that cannot be read.
    """
    path = Path(path).expanduser()
    content = _read(path)
    name = path.name.removesuffix(".gz")
    if not name.endswith(".jsonl"):
        source = _from_texts(path.name, [_WIKITEXT_ESCAPE.sub(r"\1", content)])
    else:
        source = _from_lines(path.name, content)
    if not source.text.strip():
        raise ConfigError(
            f"data: got {path}, which holds no text. Allowed: a file with text. Check the path."
        )
    return source


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        return data.decode("utf-8")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(
            f"data: got {path}, which is no whole gzip file: {error}. Allowed: gzip data. Copy it again."
        ) from error
    except OSError as error:
        raise ConfigError(
            f"data: cannot read {path}: {error.strerror}. Allowed: a .txt, .jsonl or .jsonl.gz file. Check the path."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"data: got {path}, which is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}. "
            "Allowed: UTF-8. Convert it first."
        ) from error


def _from_texts(name: str, texts: list[str]) -> Source:
    dialogues = tuple(pair for text in texts for pair in _sentence_pairs(text))
    return Source(name, "\n\n".join(texts), dialogues)


def _from_lines(name: str, content: str) -> Source:
    parts = [
        _from_object(f"line {number} of {name}", line)
        for number, line in enumerate(content.split("\n"), start=1)
        if line.strip()
    ]
    return Source(
        name,
        "\n\n".join(part.text for part in parts),
        tuple(dialogue for part in parts for dialogue in part.dialogues),
        tuple(records for part in parts for records in part.records),
    )


def _from_object(place: str, line: str) -> Source:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"data: {place} is not JSON: {error}. Allowed: one JSON object a line. Mend or remove the line."
        ) from error
    match row:
        case {"text": str(text)}:
            return _from_texts(place, [_WIKITEXT_ESCAPE.sub(r"\1", text)])
        case {"question": str(question), "answer": str(answer)}:
            answer = _CALCULATOR.sub("", answer)
            return Source(place, f"{question}\n{answer}", _whole((question, answer)))
        case {"turns": [str(), *_] as turns} if all(isinstance(turn, str) for turn in turns):
            replies = (_REPLIES[i % len(_REPLIES)] for i in range(len(turns)))
            dialogue = [part for turn in zip(turns, replies, strict=True) for part in turn]
            return Source(place, "\n\n".join(turns), _whole(dialogue))
        case {"ordered_kv_records": [*pairs]} if _are_pairs(pairs):
            records = tuple((key, value) for key, value in pairs)
            dialogues = tuple((f'What is the value of "{k}"?', f'"{v}"') for k, v in records)
            return Source(place, json.dumps(dict(records), indent=0), dialogues, (records,))
    got = ", ".join(sorted(map(str, row))) if isinstance(row, dict) else type(row).__name__
    raise ConfigError(
        f"data: {place} has no text that is known here: got {got}. Allowed: an object with the fields {FIELDS}. "
        "Rename its fields."
    )


def _whole(turns: Sequence[str]) -> tuple[Dialogue, ...]:
    # no dialogue where somebody says nothing
    stripped = tuple(turn.strip() for turn in turns)
    return (stripped,) if all(stripped) else ()


def _are_pairs(pairs: list[Any]) -> bool:
    return bool(pairs) and all(
        isinstance(pair, list)
        and len(pair) == 2
        and all(isinstance(part, str) and part for part in pair)
        for pair in pairs
    )


def _sentence_pairs(text: str) -> list[Dialogue]:
    sentences = [part.strip() for part in _SENTENCE_END.split(text)]
    long = [s for s in sentences if len(s) >= _SHORTEST_SENTENCE and not s.startswith("=")]
    return list(zip(long[::2], long[1::2], strict=False))
