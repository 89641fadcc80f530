"""Reads tables of tab-separated values row by row, and says which lines are no rows. Knows no column."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["BadRow", "Record", "records"]

MAX_RECORD_LINES = 2000
"""Lines that one quoted field may go on for: a quote that never closes must not swallow the rest of a file."""

_QUOTED = re.compile(r'(?:[^"]|"")*+')
_PLAIN = re.compile(r"[^\t]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One row of a table.

    Attributes:
        line: of its beginning, from 1.
        fields: its texts, without quotes.
    """

    line: int
    fields: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """A row that cannot be used.

    Attributes:
        line: of its beginning, from 1.
        index: what it calls itself; empty if that is not known.
        reason: why.
    """

    line: int
    index: str
    reason: str


def records(lines: Iterable[bytes]) -> Iterator[Record | BadRow]:
    """Yields the rows of a table. A field in quotes may hold tabs, line ends and, doubled, quotes; blank lines are none.

    A quote that does not close makes one bad row of its line; reading goes on with the next line.

    Args:
        lines: of a file, with their ends, in UTF-8.
    """
    ahead: deque[bytes] = deque()
    source = iter(lines)
    number = 0
    while (raw := ahead.popleft() if ahead else next(source, None)) is not None:
        number += 1
        taken, pending = [raw], _Pending()
        try:
            whole = pending.add(_decoded(raw, number == 1))
            while not whole and len(taken) < MAX_RECORD_LINES:
                more = ahead.popleft() if ahead else next(source, None)
                if more is None:
                    break
                taken.append(more)
                whole = pending.add(_decoded(more, False))
            reason = "" if whole else "a quote is opened and never closed"
        except UnicodeDecodeError as error:
            reason = f"not UTF-8: {error.reason}"
        if reason:
            ahead.extendleft(reversed(taken[1:]))
            yield BadRow(line=number, index="", reason=reason)
            continue
        if pending.fields != [""]:
            yield Record(line=number, fields=tuple(pending.fields))
        number += len(taken) - 1


def _decoded(raw: bytes, is_first: bool) -> str:
    return raw.decode("utf-8-sig" if is_first else "utf-8").replace("\r\n", "\n")


class _Pending:
    """Fields of a row whose end was not seen yet."""

    def __init__(self) -> None:
        self.fields: list[str] = []
        self._open: list[str] | None = None

    def add(self, text: str) -> bool:
        """Takes a line; returns whether the row ends with it."""
        place, end = 0, len(text) - text.endswith("\n")
        while True:
            if self._open is None:
                if text.startswith('"', place):
                    self._open, place = [], place + 1
                else:
                    plain = _PLAIN.match(text, place, end)
                    assert plain is not None, "the pattern matches nothing too"
                    self.fields.append(plain.group())
                    place = plain.end()
            if self._open is not None:
                quoted = _QUOTED.match(text, place)
                assert quoted is not None, "the pattern matches nothing too"
                self._open.append(quoted.group().replace('""', '"'))
                if quoted.end() == len(text):
                    return False
                rest = _PLAIN.match(
                    text, quoted.end() + 1, end
                )  # what follows the quote belongs to it
                assert rest is not None, "the pattern matches nothing too"
                self.fields.append("".join(self._open) + rest.group())
                self._open, place = None, rest.end()
            if place >= end:
                return True
            place += 1  # the tab
