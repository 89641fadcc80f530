"""Rows on disk, a line a unit: what is done stays done when a run is cut off. Each process writes a file of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

from oval_adapters.evaluation.rows import Row
from oval_core.errors import ConfigError

__all__ = ["KeptRows"]

_STAMP_NAME = "run.json"
_PATTERN = "rows-*.jsonl"


class KeptRows:
    """The rows in a folder.

    Args:
        folder: made if absent.
        stamp: what is measured; a folder that holds something else is refused.
        resume: whether rows that lie there count.
        rank: number of this process; another one never writes its file.
    """

    def __init__(self, folder: Path, stamp: str, *, resume: bool, rank: int = 0) -> None:
        self._folder, self._path = folder, folder / f"rows-{rank}.jsonl"
        self._stamp = stamp
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

    def open(self) -> None:
        """Makes the folder this run's, and removes a half line that a crash left in the file of this process."""
        self._folder.mkdir(parents=True, exist_ok=True)
        stamp = self._folder / _STAMP_NAME
        partial = stamp.with_name(f"{self._path.stem}.partial")
        partial.write_text(json.dumps({"stamp": self._stamp}) + "\n", encoding="utf-8")
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
            found = json.loads(stamp.read_text(encoding="utf-8"))["stamp"]
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
                f"resume: {self._folder} holds a run with other prompts or settings. Allowed: the same command. Name "
                "another folder."
            )
