"""`DenseTwin` for policies that select: attention is compared over the pages that the policy saw read, and no others."""

from __future__ import annotations

import torch
from core.dense_twin import DenseTwin, Facts

from oval_core.routing.routed import RoutedPolicy

FACTS = Facts(num_layers=4)


class RoutedTwin(DenseTwin):
    """Two dense layers, two routed ones."""

    def __init__(self, facts: Facts = FACTS, **settings: object) -> None:
        super().__init__(facts, **{"page_size": 4, "policy": "routed", **settings})
        self.left_out: list[int] = []
        self.read: list[int] = []

    @property
    def policy(self) -> RoutedPolicy:
        assert isinstance(self.cache._policy, RoutedPolicy)
        return self.cache._policy

    def unseen(
        self, layer: int, row: int, hidden: torch.Tensor | None, count: int
    ) -> torch.Tensor | None:
        mask = super().unseen(layer, row, hidden, count)
        if not self.policy.watches(layer) or not count:
            return mask
        read = set(self.policy._watch.seen(row).page_ids)
        seq = self.cache.table.sequences[row]
        unread = torch.ones(seq.length, dtype=torch.bool)
        for page in seq.pages:
            if page.page_id in read:
                unread[page.tokens] = False
        self.left_out.append(int(unread.sum()))
        self.read.append(seq.length - int(unread.sum()))
        return unread if mask is None else unread | mask
