"""Joins the draft's states, a router and the tiers: fetches pages before a tree is verified, in the order that both sides give.

Shapes: S states, C hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from oval_core.errors import ConfigError, did_you_mean
from oval_core.pages import Page
from oval_core.routing.foresight import foreseen_scores
from oval_core.routing.routed import RoutedPolicy
from oval_core.speculation_config import FUSION_ORDERS
from oval_core.tiers.prepare import prepare
from oval_core.values import PageSelection
from oval_spec.fusion import FusedPages, PagePrediction, fuse
from oval_spec.fusion_trial import FusionTrial

if TYPE_CHECKING:
    import torch

    from oval_adapters.hf_cache import OvalCache
    from oval_spec.drafter import Draft

__all__ = ["FusionCounters", "PageFusion"]

_ASKS_TARGET = ("intersection", "target", "union")
"""Orders to which the target's side counts."""

_MOST_PAGES = 16
"""Pages that come back into the pool before one verification at most, where a part of the text is read."""


@dataclass(slots=True)
class FusionCounters:
    """Totals of what was predicted and fetched before verifications.

    Attributes:
        verifications: trees for which pages were fetched.
        predicted: pages that the order named.
        common: of these, pages that both sides wanted.
        here: of `predicted`, pages that were in fast memory already.
        promoted: pages that came back into the pool.
        order: of the last verification; under `auto` the cheapest so far, or one that is being tried.
    """

    verifications: int = 0
    predicted: int = 0
    common: int = 0
    here: int = 0
    promoted: int = 0
    order: str = ""


class PageFusion:
    """Prepares the tiers of one cache for the verification of drafts."""

    def __init__(
        self,
        cache: OvalCache,
        order: str,
        budget_tokens: int | None = None,
        most_pages: int | None = None,
        trial: FusionTrial | None = None,
    ) -> None:
        """Makes a fusion.

        Args:
            cache: with `tiers`, and a policy that watches (see `watched_cache`).
            order: see `oval_spec.fusion.fuse`; where there is a trial, until it says another.
            budget_tokens: what each side may want of a sequence; None for what the pool holds.
            most_pages: pages that come back into the pool before one verification at most. None takes 16, and none where
                verifications read everything: each page that stays saves the same then, whichever it is.
            trial: measures which order costs least, from call to call; None keeps `order`.
        Raises:
            ConfigError: no such order, or a cache without tiers or without a policy that watches.
        """
        if order not in FUSION_ORDERS:
            raise ConfigError(
                f"speculation.fusion: got {order!r}; {did_you_mean(order, FUSION_ORDERS)}"
            )
        tiers, policy = cache.paged.tiers, cache.paged.policy
        if tiers is None or not isinstance(policy, RoutedPolicy):
            raise ConfigError(
                f"speculation.fusion: got {order!r} for a cache with tiers: {tiers is not None}, and policy "
                f"{policy.name!r}. Allowed: tiers, and a policy that watches its pages. Set tiers, and use `watched_cache`."
            )
        self.order = order
        self.counters = FusionCounters(order=order)
        self._trial = trial
        self._spent: float | None = None  # seconds of the last preparation
        self._tiers, self._policy = tiers, policy
        # what the target expects goes out as soon as it is known; the draft side can only add to it
        self._paged = cache.paged
        self._paged.foresees = order in (*_ASKS_TARGET, "none")
        self._table = cache.paged.table
        self._budget = budget_tokens or tiers.memory.pool_slots
        self._most_pages = most_pages

    def end(self) -> None:
        """Lets the cache look ahead by itself again, as plain decoding needs it."""
        self._close_step()
        self._paged.foresees = True

    def prepare(self, drafts: Sequence[Draft | None]) -> None:
        """Fetches for the verification of these drafts, one a row of the cache, None for a row that has ended."""
        self._close_step()
        began = time.perf_counter()
        if self.order != "none":
            self._fetch(drafts)
        self._spent = time.perf_counter() - began

    def _close_step(self) -> None:
        """Tells the trial what foretelling and waiting took at the verification before."""
        if self._trial is None:
            return
        step = self._paged.last_step
        if self._spent is not None and step is not None:
            self._trial.end_step(self._spent + step.stall_s)
        self._spent = None
        self.order = self.counters.order = self._trial.order

    def _fetch(self, drafts: Sequence[Draft | None]) -> None:
        sequences = self._table.sequences
        foreseen = self._policy.foresee(sequences)
        wanted: list[Page] = []
        scores: dict[int, float] = {}
        for row, draft in enumerate(drafts):
            if draft is None:
                continue
            states = draft.states if draft.in_target_space else None
            fused = self._fused(row, states, foreseen)
            by_id = {page.page_id: page for page in sequences[row].pages}
            wanted += [by_id[page_id] for page_id in fused.page_ids]
            scores |= fused.scores
        wanted.sort(key=lambda page: -scores[page.page_id])  # rows share the pool
        here = self._tiers.residency.page_ids
        self.counters.verifications += sum(draft is not None for draft in drafts)
        self.counters.predicted += len(wanted)
        self.counters.here += sum(page.page_id in here for page in wanted)
        expected = self._expected(wanted, foreseen)
        most = self._most_pages
        if most is None:
            most = 0 if foreseen is None else _MOST_PAGES
        moved = self._worth_moving(wanted, foreseen)
        self.counters.promoted += prepare(self._tiers, moved, scores, expected, most)

    def _worth_moving(
        self, wanted: Sequence[Page], foreseen: PageSelection | None
    ) -> Sequence[Page]:
        """Returns the pages that are worth bringing back: under `routed` nothing but the target's choice is read."""
        if foreseen is None or self._policy.name != "routed" or self.order not in _ASKS_TARGET:
            return wanted
        rows = [own for group in foreseen.groups for own in group]
        if None in rows:  # a row that reads everything
            return wanted
        read = {page.page_id for own in rows for page in own or ()}
        return [page for page in wanted if page.page_id in read]

    def _fused(
        self, row: int, states: torch.Tensor | None, foreseen: PageSelection | None
    ) -> FusedPages:
        found = foreseen_scores(self._policy, self._table.sequences, row, states)
        if found is None:
            return FusedPages()
        ids, counts = [p.page_id for p in found.pages], [len(p) for p in found.pages]
        target = PagePrediction.of_scores(ids, counts, found.newest)
        if foreseen is not None:  # the target says which pages, not only how much of each
            read = {p.page_id for rows in foreseen.groups for p in rows[row] or found.pages}
            known = [foreseen.scores.get(p, 0.0) if p in read else 0.0 for p in ids]
            total = sum(known) or 1.0
            target = replace(target, shares=tuple(score / total for score in known))
        draft = None
        if found.states is not None:
            draft = PagePrediction.of_scores(ids, counts, found.states)
        fused = fuse(draft, target, self.order, self._budget)
        self.counters.common += fused.num_common
        return fused

    def _expected(
        self, wanted: Sequence[Page], foreseen: PageSelection | None
    ) -> PageSelection | None:
        """Returns what the verification will be taken to stream: under a policy that reads everything, all of it."""
        if foreseen is None or self.order in _ASKS_TARGET:
            return foreseen
        ids = {page.page_id for page in wanted}  # nobody asked the target
        rows = tuple(
            tuple(p for p in seq.pages if p.page_id in ids) for seq in self._table.sequences
        )
        return PageSelection((rows,), dict.fromkeys(foreseen.group_of, 0))
