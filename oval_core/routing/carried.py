"""Carries what is remembered of pages over to the pages that took their tokens over. Reads no K/V.

Shapes: G layer groups, P pages before, Q pages after; leading dimensions are free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from oval_core.repaging import Repaged
from oval_core.routing.mass_watch import SeenRow
from oval_core.routing.view import PageHistory


class Carrier:
    """Takes tensors over the pages `ids` to tensors over the pages that hold their tokens now.

    Mass goes by the share of its tokens that a page gave away: sums over pages stay. Facts that are no sums (how often,
    how long ago) are those of the page that gave, of the largest such where several did.
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
        part_of = {page.page_id: part for part in parts for page in part.old}
        new_ids: dict[int, int] = {}
        for page_id in ids:
            part = part_of.get(page_id)
            for other in [page_id] if part is None else [page.page_id for page in part.new]:
                new_ids.setdefault(other, len(new_ids))
        source: list[int] = []
        target: list[int] = []
        share: list[float] = []
        for place, page_id in enumerate(ids):
            part = part_of.get(page_id)
            given = [(page_id, 1.0)] if part is None else _given(page_id, part, num_known)
            for other, own in given:
                source.append(place)
                target.append(new_ids[other])
                share.append(own)
        self.ids = list(new_ids)
        """The pages now."""
        self._source = torch.tensor(source, dtype=torch.long)
        self._target = torch.tensor(target, dtype=torch.long)
        self._share = torch.tensor(share)

    def spread(self, mass: torch.Tensor) -> torch.Tensor:
        """Returns mass [..., Q] of mass [..., P]."""
        given = mass.index_select(-1, self._source) * self._share
        out = mass.new_zeros(*mass.shape[:-1], len(self.ids))
        return out.index_add_(-1, self._target, given)

    def largest(self, fact: torch.Tensor) -> torch.Tensor:
        """Returns [..., Q] the largest of [..., P] among the pages that gave tokens; 0 (false) where none did."""
        given = fact.index_select(-1, self._source)
        out = fact.new_zeros(*fact.shape[:-1], len(self.ids))
        index = self._target.expand(given.shape)
        if fact.dtype == torch.bool:
            return out.byte().scatter_reduce_(-1, index, given.byte(), "amax").bool()
        return out.scatter_reduce_(-1, index, given, "amax")

    def history(self, old: PageHistory) -> PageHistory:
        """Returns the history [..., G, Q] of [..., G, P]."""
        sums = ("last", "fast", "slow", "total", "peak")
        counts = ("steps", "chosen", "age")
        return PageHistory(
            **{name: self.spread(getattr(old, name)) for name in sums},
            **{name: self.largest(getattr(old, name)) for name in counts},
        )

    def seen(self, old: SeenRow) -> SeenRow:
        """Returns what a forward saw, over the pages now."""
        return replace(
            old,
            page_ids=tuple(self.ids),
            mass=self.spread(old.mass),
            peak=self.spread(old.peak),
            read=self.largest(old.read),
        )


def _given(page_id: int, part: Repaged, num_known: int | None) -> list[tuple[int, float]]:
    """Returns (new page, share of the tokens known of the old one that it holds)."""
    old = next(page for page in part.old if page.page_id == page_id)
    known = {token for token in old.tokens if num_known is None or token < num_known}
    held = [(page.page_id, len(known.intersection(page.tokens))) for page in part.new]
    return [(other, count / len(known)) for other, count in held if count]
