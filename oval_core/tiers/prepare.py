"""Readies the tiers for a forward, between two of them: pages come back into the pool, others begin to come. Changes no result."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from oval_core.errors import TierError
from oval_core.pages import Page
from oval_core.tiers.tiered_storage import TieredStorage
from oval_core.values import PageSelection

__all__ = ["prepare"]


def prepare(
    tiers: TieredStorage,
    wanted: Sequence[Page],
    scores: Mapping[int, float],
    expected: PageSelection | None,
    most_pages: int,
) -> int:
    """Brings pages back into the pool in place of those that nobody wants, and starts to fetch what will be streamed.

    Args:
        tiers: no forward is running.
        wanted: pages, those that are wanted most first; only as many as the pool holds count, beside sinks and the
            newest pages, which stay.
        scores: by page id: where memory is short, low ones leave it first; a page without one counts 0.
        expected: what the next forward will most likely read; None for everything.
        most_pages: of these that may come back at most; the others are streamed.
    Returns:
        pages that came back.
    """
    tiers.residency.scores = scores
    sequences = tiers._table.sequences
    # open pages stay, and so do sinks and the newest ones: every forward reads them
    near = [page for seq in sequences for page in tiers.residency._kept_longest(seq)]
    near += [seq.tail for seq in sequences if seq.tail is not None]
    stays = {page.page_id: page for page in near if page.page_id in tiers.residency}
    others = [page for page in wanted if page.page_id not in stays]
    held = _fitting(tiers, others, sum(page.capacity for page in stays.values()))
    hold = stays.keys() | {page.page_id for page in held}
    away = [page for page in held if page.page_id not in tiers.residency]
    came = 0
    # an error of a tier fails the forward that needs the page, not what was committed before
    with contextlib.suppress(TierError):
        for page in away[:most_pages]:
            if not tiers._make_fit([page.capacity], hold):
                break
            tiers._bring_back(page)
            came += 1
    expect(tiers, expected)
    return came


def expect(tiers: TieredStorage, selection: PageSelection | None) -> None:
    """Starts to fetch what the next forward will most likely read of the slow tier; None for everything."""
    sequences = tiers._table.sequences
    everything = [None] * len(sequences)
    groups = () if selection is None else selection.groups
    batches = [tiers._planner.batches(sequences, rows) for rows in (*groups, everything)]
    group_of = {} if selection is None else selection.group_of
    tiers.slow.expect(
        [
            replace(batch, layer=place)
            for place, layer in enumerate(tiers.layers)
            for batch in batches[group_of.get(layer, -1)]
        ]
    )
    tiers.slow.end()


def _fitting(tiers: TieredStorage, wanted: Sequence[Page], taken: int) -> list[Page]:
    """Returns the first of the pages that fit into the pool together, beside `taken` slots."""
    sums = itertools.accumulate((page.capacity for page in wanted), initial=taken)
    room = tiers.memory.pool_slots
    return [page for page, total in zip(wanted, list(sums)[1:], strict=True) if total <= room]
