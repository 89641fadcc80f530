"""What the queries of one cache read, page by page, by row and token. Knows no model and no text.

Shapes: W queries, Y layers, G groups of layers, P pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oval_core.repaging import Repaged
from oval_core.routing.mass_watch import SeenRow

__all__ = ["ReadLog", "TokenRead"]


@dataclass(frozen=True, slots=True, eq=False)
class TokenRead:
    """What the query of one token read.

    Attributes:
        page_ids: the pages that got any attention.
        mass: [G, P] share of attention of each, mean over the layers of a group and over heads; sums to 1 in each group.
    """

    page_ids: tuple[int, ...]
    mass: torch.Tensor


class ReadLog:
    """Reads of each row, by the place of the token that asked among the row's stored tokens."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        """Logs by these groups of layers."""
        self.groups = tuple(tuple(own) for own in groups)
        self._rows: list[dict[int, TokenRead]] = []

    def note(self, row: int, first: int, seen: SeenRow) -> None:
        """Adds what consecutive tokens read, each layer for itself.

        Args:
            row: whose tokens.
            first: place of the first of them.
            seen: `mass` [W, Y, P], a group for each layer.
        """
        while len(self._rows) <= row:
            self._rows.append({})
        by_group = torch.stack([seen.mass[:, list(own)].mean(1) for own in self.groups], 1)
        for place, mass in enumerate(by_group, start=first):
            # pages of drafts that were dropped came after the token: they got nothing, and are gone
            read = mass.amax(0).nonzero()[:, 0].tolist()
            ids = tuple(seen.page_ids[i] for i in read)
            self._rows[row][place] = TokenRead(ids, mass[:, read])

    def read(self, row: int, place: int) -> TokenRead | None:
        """Returns what a token read; None where nobody watched."""
        return self._rows[row].get(place) if row < len(self._rows) else None

    def repage(self, row: int, parts: Sequence[Repaged]) -> None:
        """Follows pages whose tokens went to others: what a page got is shared out evenly among its tokens."""
        if row >= len(self._rows):
            return
        own = self._rows[row]
        for part in parts:
            for place, read in own.items():
                own[place] = _shared_out(read, part)

    def reorder(self, rows: Sequence[int]) -> None:
        """Makes row i what row rows[i] was."""
        if self._rows:
            self._rows = [dict(self._rows[row]) for row in rows]

    def reset(self) -> None:
        """Forgets every row."""
        self._rows = []

    def copy(self) -> ReadLog:
        """Returns an independent copy."""
        twin = ReadLog(self.groups)
        twin._rows = [dict(own) for own in self._rows]
        return twin


def _shared_out(read: TokenRead, part: Repaged) -> TokenRead:
    gone = {page.page_id: i for i, page in enumerate(part.old)}
    if not any(page_id in gone for page_id in read.page_ids):
        return read
    share = torch.zeros(len(part.old), len(part.new))
    for i, old in enumerate(part.old):
        for j, new in enumerate(part.new):
            share[i, j] = len(set(old.tokens) & set(new.tokens)) / len(old.tokens)
    stays = [k for k, page_id in enumerate(read.page_ids) if page_id not in gone]
    goes = [k for k, page_id in enumerate(read.page_ids) if page_id in gone]
    from_old = share[[gone[read.page_ids[k]] for k in goes]]
    mass = torch.cat([read.mass[:, stays], read.mass[:, goes] @ from_old], 1)
    ids = tuple(read.page_ids[k] for k in stays) + tuple(page.page_id for page in part.new)
    return TokenRead(ids, mass)
