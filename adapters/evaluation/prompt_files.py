"""Reads files of prompts: Spec-Bench, MT-bench, GSM8K, HumanEval, or a prompt a line. Knows no tokens."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oval_core.errors import ConfigError

__all__ = ["MT_BENCH", "EvalPrompt", "read_prompts", "take"]

FIELDS = "turns; question; prompt"
MT_BENCH = "mt_bench"
_MT_BENCH_CATEGORIES = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalPrompt:
    """One prompt of a file.

    Attributes:
        name: its `question_id` or `task_id`, else the number of its line; other prompts may have the same.
        category: its category; in Spec-Bench the eight of MT-bench are one, `mt_bench`; else the file's name.
        text: what the user says first.
        num_later_turns: turns after it, which are not asked.
    """

    name: str
    category: str
    text: str
    num_later_turns: int = 0


def read_prompts(path: str | Path) -> list[EvalPrompt]:
    """Reads a file: `.jsonl` holds an object or a string a line, anything else a prompt a line; both also with `.gz`.

    Raises:
        ConfigError: no such file, not UTF-8, a line that is no prompt, or no prompt at all.
    """
    path = Path(path).expanduser()
    name = path.name.removesuffix(".gz")
    is_json, fallback = name.endswith(".jsonl"), name.partition(".")[0] or "all"
    prompts = [
        _from_json(path.name, number, line, fallback)
        if is_json
        else EvalPrompt(name=str(number), category=fallback, text=line.strip())
        for number, line in enumerate(_read(path).split("\n"), start=1)
        if line.strip()
    ]
    if not prompts:
        raise ConfigError(
            f"prompts: got {path}, which holds no prompt. Allowed: a file with a prompt a line. Check the path."
        )
    return _grouped(prompts)


def take(
    prompts: Sequence[EvalPrompt], limit: int | None, per_category: int | None
) -> list[EvalPrompt]:
    """Returns the first `per_category` prompts of each category, and of these the first `limit`; None takes all."""
    for name, number in (("limit", limit), ("per-category", per_category)):
        if number is not None and number < 1:
            raise ConfigError(
                f"{name}: got {number}. Allowed: 1 or more. Give such a number, or leave it out."
            )
    seen: Counter[str] = Counter()
    kept = []
    for prompt in prompts:
        seen[prompt.category] += 1
        if per_category is None or seen[prompt.category] <= per_category:
            kept.append(prompt)
    return kept[:limit]


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        return data.decode("utf-8-sig")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(
            f"prompts: got {path}, which is no whole gzip file: {error}. Allowed: gzip data. Copy it again."
        ) from error
    except OSError as error:
        raise ConfigError(
            f"prompts: cannot read {path}: {error.strerror}. Allowed: a .txt, .jsonl or .gz file. Check the path."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"prompts: got {path}, which is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}. "
            "Allowed: UTF-8. Convert it first."
        ) from error


def _from_json(file: str, number: int, line: str, fallback: str) -> EvalPrompt:
    place = f"prompts: line {number} of {file}"
    try:
        row: Any = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{place} is not JSON: {error}. Allowed: a JSON object or string a line. Mend or remove the line."
        ) from error
    match row:
        case str(text):
            row, later = {}, 0
        case {"turns": [str(text), *rest]} if all(isinstance(turn, str) for turn in rest):
            later = len(rest)
        case {"question": str(text)} | {"prompt": str(text)} if "turns" not in row:
            later = 0
        case _:
            raise ConfigError(
                f"{place} holds no prompt: got {_described(row)}. Allowed: a string, or an object with text in one of "
                f"the fields {FIELDS} (a list of texts). Rename its fields."
            )
    if not text.strip():
        raise ConfigError(f"{place} is an empty prompt. Allowed: any text. Remove the line.")
    category = row.get("category", fallback)
    if not (isinstance(category, str) and category):
        raise ConfigError(
            f"{place}: category: got {category!r}. Allowed: a name. Name it, or leave the field out."
        )
    name = row.get("question_id", row.get("task_id", number))
    return EvalPrompt(name=str(name), category=category, text=text, num_later_turns=later)


def _described(row: object) -> str:
    if isinstance(row, dict):
        return f"the fields {', '.join(sorted(map(str, row))) or '(none)'}"
    return type(row).__name__


def _grouped(prompts: list[EvalPrompt]) -> list[EvalPrompt]:
    """Spec-Bench counts the categories of MT-bench as one; in MT-bench itself they stay."""
    if {prompt.category for prompt in prompts} <= _MT_BENCH_CATEGORIES:
        return prompts
    return [
        replace(prompt, category=MT_BENCH) if prompt.category in _MT_BENCH_CATEGORIES else prompt
        for prompt in prompts
    ]
