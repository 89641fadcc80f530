"""The policy `guarded`: a routed selection, checked layer by layer against the true query. Shapes as in `routed.py`."""

from __future__ import annotations

import torch

from oval_core.routing.chosen import Chosen
from oval_core.routing.repair import cover
from oval_core.routing.routed import RoutedPolicy


class GuardedPolicy(RoutedPolicy):
    """As `routed`; then each layer's true query and the key summaries estimate what was missed, and that is read too."""

    name = "guarded"

    @property
    def _looks_again(self) -> bool:
        return False  # coverage says how much the layer's query spends

    def _signal_names(self) -> set[str]:
        return super()._signal_names() | {"sketch"}

    def _more(
        self, layer: int, row: int, chosen: Chosen, read: torch.Tensor
    ) -> torch.Tensor | None:
        """Returns the likeliest unread pages until the estimated mass of what is read reaches `coverage`."""
        more = super()._more(layer, row, chosen, read)
        if more is not None:
            read = read | more
        book = self._rows[row].book
        assert book is not None, "guarded needs summaries"
        seen = self._watch.seen(row)
        query = self._watch.query(row)
        scores = book.scores("sketch", query, self._layers.index(layer)).transpose(0, 1).cpu()
        self._counters.summary_tokens += book.cost("sketch", 1)
        unread = ~read[: book.num_pages]
        known = seen.lse.cpu()
        if more is not None:  # not read yet: what they hold is estimated too
            known = torch.cat([known, scores[..., more[: book.num_pages]]], -1)
        extra = cover(known, scores, unread, self._config.coverage)
        missing = torch.zeros_like(read)
        missing[: book.num_pages] = extra
        return missing if more is None else missing | more
