"""What one row of a forward reads: pages and a mask over them."""

from __future__ import annotations

from collections.abc import Sequence
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
