"""Carries what is remembered of pages over to the pages that took their tokens over. Reads no K/V.

Shapes: G layer groups, P pages before, Q pages after; leading dimensions are free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from oval_core.repaging import Repaged
from oval_core.routing.mass_watch import SeenRow
from oval_core.routing.view import PageHistory


class Carrier:
    """Takes tensors over the pages `ids` to tensors over the pages that hold their tokens now.

    Mass goes by the share of its tokens that a page gave away: sums over pages stay. Facts that are no sums (how often,
    how long ago) are those of the page that gave; where several did, of the one that was read most or last.
    """

    def __init__(
        self, ids: Sequence[int], parts: Sequence[Repaged], num_known: int | None = None
    ) -> None:
        """Plans the move.

        Args:
            ids: pages that something is remembered of.
            parts: what became what; pages that are not in it stay as they are.
            num_known: tokens of the sequence when that was seen; None for all that the pages hold.
        """
        given = {page_id: [(page_id, 1.0)] for page_id in ids} | _given(parts, num_known)
        moves = [(i, other, own) for i, page_id in enumerate(ids) for other, own in given[page_id]]
        places: dict[int, int] = {}
        for _, other, _ in moves:
            places.setdefault(other, len(places))
        self.ids = list(places)
        """The pages now."""
        self._source = torch.tensor([source for source, _, _ in moves], dtype=torch.long)
        self._target = torch.tensor([places[other] for _, other, _ in moves], dtype=torch.long)
        self._share = torch.tensor([own for _, _, own in moves])

    def spread(self, mass: torch.Tensor) -> torch.Tensor:
        """Returns mass [..., Q] of mass [..., P]."""
        given = mass.index_select(-1, self._source) * self._share
        out = mass.new_zeros(*mass.shape[:-1], len(self.ids))
        return out.index_add_(-1, self._target, given)

    def best(self, fact: torch.Tensor, how: Literal["amax", "amin"]) -> torch.Tensor:
        """Returns [..., Q] the largest or smallest of [..., P] among the pages that gave tokens."""
        given = fact.index_select(-1, self._source).float()
        out = given.new_zeros(*fact.shape[:-1], len(self.ids))
        index = self._target.expand(given.shape)
        return out.scatter_reduce_(-1, index, given, how, include_self=False).to(fact.dtype)

    def history(self, old: PageHistory) -> PageHistory:
        """Returns the history [..., G, Q] of [..., G, P]."""
        sums = ("last", "fast", "slow", "total", "peak")
        return PageHistory(
            **{name: self.spread(getattr(old, name)) for name in sums},
            steps=self.best(old.steps, "amax"),
            chosen=self.best(old.chosen, "amax"),
            age=self.best(old.age, "amin"),
        )

    def seen(self, old: SeenRow) -> SeenRow:
        """Returns what a forward saw, over the pages now."""
        return replace(
            old,
            page_ids=tuple(self.ids),
            mass=self.spread(old.mass),
            peak=self.spread(old.peak),
            read=self.best(old.read, "amax"),
        )


def _given(parts: Sequence[Repaged], num_known: int | None) -> dict[int, list[tuple[int, float]]]:
    """Returns, by old page, (new page, share of the tokens known of the old one that it holds)."""
    found = {}
    for part in parts:
        owner = {token: page.page_id for page in part.new for token in page.tokens}
        for page in part.old:
            known = [token for token in page.tokens if num_known is None or token < num_known]
            held = Counter(owner[token] for token in known)
            found[page.page_id] = [(other, count / len(known)) for other, count in held.items()]
    return found
