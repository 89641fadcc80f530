"""Which pages should come to fast memory before a tree is verified, and in which order. Plain values; moves nothing.

Two sides predict: the draft side from the states of tokens that may come, the target side from what the target has read so
far. What both expect comes first, then what one of them does. P pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from oval_core.errors import ConfigError, did_you_mean
from oval_core.speculation_config import FUSION_ORDERS


@dataclass(frozen=True, slots=True)
class PagePrediction:
    """What one side expects of the pages of one sequence.

    Attributes:
        page_ids: [P] in the order of the sequence.
        counts: [P] tokens of each, at least 1.
        shares: [P] part of the attention mass that a page is expected to get, 0 or more.
    """

    page_ids: tuple[int, ...]
    counts: tuple[int, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.page_ids) == len(self.counts) == len(self.shares), "one value a page"

    @classmethod
    def of_scores(
        cls, page_ids: Sequence[int], counts: Sequence[int], scores: torch.Tensor
    ) -> PagePrediction:
        """Builds a prediction from a router's scores.

        Args:
            page_ids: [P].
            counts: [P].
            scores: [G, P] log mass up to a constant a group, or [S, G, P] for states of tokens that may come: a page is
                wanted as much as the one that wants it most wants it.
        """
        shares = torch.softmax(scores.float(), -1).nan_to_num(0.0)
        best = shares.amax(0) if shares.ndim == 3 else shares
        means = cast("list[float]", best.mean(0).tolist())
        return cls(tuple(page_ids), tuple(counts), tuple(means))

    def picked(self, budget_tokens: int) -> frozenset[int]:
        """Returns the pages of the largest share a token that fit into a budget; one that does not is passed over.

        Pages without any share are not wanted.
        """
        left, chosen = budget_tokens, set()
        density = {p: s / c for p, s, c in self._rows()}
        size = dict(zip(self.page_ids, self.counts, strict=True))
        for page_id in sorted(self.page_ids, key=lambda page_id: -density[page_id]):
            if density[page_id] > 0 and size[page_id] <= left:
                chosen.add(page_id)
                left -= size[page_id]
        return frozenset(chosen)

    def newest(self, budget_tokens: int) -> PagePrediction:
        """Returns the same pages, wanted for nothing but how new they are; only the newest that fit are wanted at all."""
        shares = [0.0] * len(self.page_ids)
        left = budget_tokens
        for place in reversed(range(len(shares))):
            left -= self.counts[place]
            if left < 0:
                break
            shares[place] = (place + 1) / len(shares)
        return PagePrediction(self.page_ids, self.counts, tuple(shares))

    def _rows(self) -> list[tuple[int, float, int]]:
        return list(zip(self.page_ids, self.shares, self.counts, strict=True))


@dataclass(frozen=True, slots=True)
class FusedPages:
    """Pages to fetch, first ones first.

    Attributes:
        page_ids: in order.
        scores: by page id, falling in that order: low ones leave fast memory first. Those that both sides want are 1 or
            more, where both were asked.
        num_common: pages that both sides want.
    """

    page_ids: tuple[int, ...] = ()
    scores: Mapping[int, float] = field(default_factory=dict)
    num_common: int = 0


def fuse(
    draft: PagePrediction | None,
    target: PagePrediction | None,
    order: str,
    budget_tokens: int,
) -> FusedPages:
    """Returns the pages to fetch ahead of a verification. Limits what is fetched ahead, never what is read.

    Args:
        draft: what the draft side expects; None where it cannot tell.
        target: what the target side does.
        order: `intersection`: what both want, then what one wants; `union`: the same pages, by share alone; `draft`,
            `target`: one side alone; `recency`: the newest pages; `none`.
        budget_tokens: what each side may want.
    Raises:
        ConfigError: no such order.
    """
    if order not in FUSION_ORDERS:
        raise ConfigError(
            f"speculation.fusion: got {order!r}; {did_you_mean(order, FUSION_ORDERS)}"
        )
    return _ORDERS[order](draft, target, budget_tokens)


def _none(*_: object) -> FusedPages:
    return FusedPages()


def _recency(
    draft: PagePrediction | None, target: PagePrediction | None, budget_tokens: int
) -> FusedPages:
    known = target or draft
    return _one(None if known is None else known.newest(budget_tokens), budget_tokens)


def _intersection(
    draft: PagePrediction | None, target: PagePrediction | None, budget_tokens: int
) -> FusedPages:
    return _both(draft, target, budget_tokens, 1.0)


def _union(
    draft: PagePrediction | None, target: PagePrediction | None, budget_tokens: int
) -> FusedPages:
    return _both(draft, target, budget_tokens, 0.0)


def _one(side: PagePrediction | None, budget_tokens: int) -> FusedPages:
    if side is None:
        return FusedPages()
    picked, shares = side.picked(budget_tokens), _shares(side)
    return _ranked({page_id: shares[page_id] for page_id in picked}, 0)


def _both(
    draft: PagePrediction | None,
    target: PagePrediction | None,
    budget_tokens: int,
    first: float,
) -> FusedPages:
    if draft is None or target is None:
        return _one(draft or target, budget_tokens)
    ours, theirs = target.picked(budget_tokens), draft.picked(budget_tokens)
    common = ours & theirs
    mine, other = _shares(target), _shares(draft)
    scores = {
        page_id: (mine.get(page_id, 0.0) + other.get(page_id, 0.0)) / 2
        + (first if page_id in common else 0.0)
        for page_id in ours | theirs
    }
    return _ranked(scores, len(common))


def _ranked(scores: Mapping[int, float], num_common: int) -> FusedPages:
    ordered = sorted(scores, key=lambda page_id: (-scores[page_id], page_id))
    return FusedPages(tuple(ordered), {page_id: scores[page_id] for page_id in ordered}, num_common)


def _shares(side: PagePrediction) -> dict[int, float]:
    return dict(zip(side.page_ids, side.shares, strict=True))


_ORDERS: dict[str, Callable[[PagePrediction | None, PagePrediction | None, int], FusedPages]] = {
    "draft": lambda draft, target, budget: _one(draft, budget),  # noqa: ARG005
    "intersection": _intersection,
    "none": _none,
    "recency": _recency,
    "target": lambda draft, target, budget: _one(target, budget),  # noqa: ARG005
    "union": _union,
}
