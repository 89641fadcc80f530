"""Reads prompts from a file: Spec-Bench, MT-bench, GSM8K, HumanEval, or one string a line."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path

from oval_core.errors import ConfigError

__all__ = ["Prompt", "read_prompts"]

_FIELDS = ("turns", "question", "prompt")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        text: the user's words.
        kind: its category where the file has one, else the file's name.
    """

    text: str
    kind: str


def read_prompts(path: str | Path) -> list[Prompt]:
    """Returns the prompts of a file, in order. Of several turns the first is taken.

    `.jsonl` holds one object a line with `turns`, `question` or `prompt`, and a `category` maybe; any other file one
    prompt a line. Both may end in `.gz`.

    Raises:
        ConfigError: no such file, not UTF-8, no prompt in it, or a line that cannot be read.
    """
    path = Path(path).expanduser()
    lines = _lines(path)
    name = path.name.removesuffix(".gz")
    stem = name.rpartition(".")[0] or name
    if name.endswith(".jsonl"):
        prompts = [_parse(path, i, line, stem) for i, line in enumerate(lines, 1) if line.strip()]
    else:
        prompts = [Prompt(line.strip(), stem) for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(
            f"data: got {path}, which holds no prompt. Allowed: a file with prompts. Check the path."
        )
    return prompts


def _lines(path: Path) -> list[str]:
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        return data.decode("utf-8").split("\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data: cannot read {path}: {error}. Allowed: self, a file with prompts, a folder of answers. Check the path."
        ) from error


def _parse(path: Path, number: int, line: str, stem: str) -> Prompt:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            f"data: line {number} of {path} is no JSON ({error}). Allowed: one object a line. Mend the line."
        ) from error
    text = None
    if isinstance(values, dict):
        text = next((values[field] for field in _FIELDS if field in values), None)
        if isinstance(text, list) and text:
            text = text[0]
    if not (isinstance(text, str) and text.strip()):
        raise ConfigError(
            f"data: line {number} of {path} has no prompt. Allowed: an object with one of {', '.join(_FIELDS)}. Mend "
            "the line, or name another file."
        )
    return Prompt(text, str(values.get("category", stem)))
