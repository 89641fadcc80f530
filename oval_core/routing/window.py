"""The policy that reads the first and the last tokens of a text: what drafts by a part of the cache are measured against."""

from __future__ import annotations

from collections.abc import Sequence

from oval_core.config import RoutingConfig
from oval_core.pages import SequencePages
from oval_core.policy import FullPolicy
from oval_core.routing.layer_groups import layer_groups
from oval_core.values import PageSelection, RowPagesChosen


class WindowPolicy(FullPolicy):
    """Reads sinks and the newest pages, within a budget of tokens; remembers nothing."""

    name = "window"

    def __init__(self, config: RoutingConfig, windows: Sequence[int | None]) -> None:
        """Makes the policy.

        Args:
            config: its budget, sinks and dense layers count.
            windows: sliding window of each decoder layer; layers that have one read what they always do.
        """
        self._config = config
        self._group_of = dict.fromkeys(layer_groups(config, windows), 0)

    def select(self, sequences: Sequence[SequencePages], num_new: Sequence[int]) -> PageSelection:
        """Returns the pages to read; everything where a row brings many tokens."""
        rows = tuple(
            self._pages(seq, new) if 0 < new <= self._config.max_queries else None
            for seq, new in zip(sequences, num_new, strict=True)
        )
        if all(pages is None for pages in rows):
            return PageSelection()
        return PageSelection((rows,), self._group_of)

    def clone(self) -> WindowPolicy:
        """Returns itself: there is nothing that could differ."""
        return self

    def _pages(self, seq: SequencePages, num_new: int) -> RowPagesChosen:
        budget = self._config.budget(seq.length)
        if seq.length <= budget:
            return None
        sinks = [page for page in seq.pages if page.tokens[0] < self._config.num_sink_tokens]
        left = budget - sum(len(page) for page in sinks)
        newest = []
        for page in reversed(seq.pages[len(sinks) :]):
            left -= len(page)
            # new tokens are read in any case
            if left < 0 and page.tokens[-1] < seq.length - num_new:
                break
            newest.append(page)
        return (*sinks, *reversed(newest))
