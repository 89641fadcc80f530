"""What one row of a forward reads: pages and a mask over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from oval_core.pages import Page


@dataclass(frozen=True, slots=True)
class Chosen:
    """What one row of the running forward reads: a mask [G, P] over its pages, in the order of the sequence."""

    pages: Sequence[Page]
    mask: torch.Tensor
    budget: int


def pages_of(pages: Sequence[Page], mask: torch.Tensor) -> list[Page]:
    """Returns the pages that a mask [P] names."""
    return [page for page, chosen in zip(pages, mask.tolist(), strict=True) if chosen]


def wanted_later(
    chosen: Sequence[Chosen | None], past_mass: Sequence[Callable[[int], torch.Tensor]]
) -> dict[int, float]:
    """Returns by page id how much it is wanted later: the share of the groups that chose it, and its past mass.

    Args:
        chosen: one a row.
        past_mass: by row, what returns the mass of its first so many pages, [P].
    """
    scores: dict[int, float] = {}
    for own, mass in zip(chosen, past_mass, strict=True):
        if own is not None:
            wanted = own.mask.float().mean(0) + mass(len(own.pages))
            for page, score in zip(own.pages, wanted.tolist(), strict=True):
                scores[page.page_id] = max(score, scores.get(page.page_id, 0.0))
    return scores
