"""Rows on disk, a line a unit: what is done stays done when a run is cut off. Each process writes a file of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oval_adapters.evaluation.rows import Row
from oval_core.errors import ConfigError

__all__ = ["KeptRows", "flat"]

_STAMP_NAME = "run.json"
_PATTERN = "rows-*.jsonl"


class KeptRows:
    """The rows in a folder.

    Args:
        folder: made if absent.
        stamp: what is measured; a folder that holds something else is refused.
        resume: whether rows that lie there count.
        rank: number of this process; another one never writes its file.
        settings: of the run, plain values that the stamp depends on; what differs from those in the folder is told.
    """

    def __init__(
        self,
        folder: Path,
        stamp: str,
        *,
        resume: bool,
        rank: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder, self._path = folder, folder / f"rows-{rank}.jsonl"
        self._stamp, self._settings = stamp, dict(settings or {})
        self.facts: dict[str, Any] = {}
        """What `open` was told by the run that lies there; nothing where none does."""
        self._check(resume)

    def read(self) -> list[Row]:
        """Returns the rows of all processes, by unit. A line that was cut off does not count."""
        rows: dict[int, Row] = {}
        for path in sorted(self._folder.glob(_PATTERN)):
            for line in path.read_bytes().split(b"\n")[
                :-1
            ]:  # what follows the last end is no whole line
                row = Row.from_dict(json.loads(line))
                rows[row.unit] = row
        return [rows[unit] for unit in sorted(rows)]

    def open(self, facts: Mapping[str, Any] | None = None) -> None:
        """Makes the folder this run's, and removes a half line that a crash left in the file of this process.

        Args:
            facts: plain values that a later run wants to know without the model; see `facts`.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        stamp = self._folder / _STAMP_NAME
        told = {"stamp": self._stamp, "settings": self._settings, "facts": dict(facts or {})}
        partial = stamp.with_name(f"{self._path.stem}.partial")
        partial.write_text(json.dumps(told) + "\n", encoding="utf-8")
        partial.replace(stamp)  # every process writes the same
        if self._path.is_file():
            data = self._path.read_bytes()
            with self._path.open("r+b") as file:
                file.truncate(data.rfind(b"\n") + 1)

    def add(self, row: Row) -> None:
        """Writes a row, and waits until it lies on disk."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row.to_dict()) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _check(self, resume: bool) -> None:
        if self._folder.exists() and not self._folder.is_dir():
            raise ConfigError(f"out: got {self._folder}, a file. Allowed: a folder. Name another.")
        stamp = self._folder / _STAMP_NAME
        if not stamp.is_file():
            return
        try:
            told = json.loads(stamp.read_text(encoding="utf-8"))
            found = told["stamp"]
            settings, self.facts = dict(told.get("settings", {})), dict(told.get("facts", {}))
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ConfigError(
                f"out: {stamp} cannot be read: {error}. Allowed: a folder of such a run. Name another, or remove it."
            ) from error
        if not resume:
            raise ConfigError(
                f"out: got {self._folder}, which holds an earlier run. Allowed: a new folder, or --resume to go on with "
                "it. Choose one."
            )
        if found != self._stamp:
            raise ConfigError(
                f"resume: {self._folder} holds a run with other prompts or settings{_told(settings, self._settings)}. Allowed: "
                "the same command. Name another folder."
            )


def _told(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Returns what differs, to end a sentence; nothing where one of the two is not known, or only prompts differ."""
    if not there or not here:
        return ""
    told, own = flat(there), flat(json.loads(json.dumps(here)))
    parts = [
        f"{name} {told.get(name)!r} there, {own.get(name)!r} here"
        for name in dict.fromkeys([*told, *own])
        if told.get(name) != own.get(name)
    ]
    return f" ({'; '.join(parts) or 'the prompts differ, not the settings'})"


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Returns nested settings in one mapping, by names with points: `vision.budget`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = value
    return found
