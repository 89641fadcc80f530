"""How many image tokens a prompt may cost, and which pages fit. Knows scores, not where they come from.

Shapes: P pages of all images of one row, image after image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oval_core.config import check_int
from oval_core.errors import ConfigError

__all__ = ["ImageBudget", "choose_pages"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageBudget:
    """Image tokens that a row may read: a share of those it has, or a number. One of the two.

    Attributes:
        share: of all image tokens of the row, 0..1.
        tokens: of the row, over all of its images.
        pages_per_image: pages that each image keeps in any case, its best ones, even where they outgrow the budget; a
            budget of 0 keeps none.
    """

    share: float | None = None
    tokens: int | None = None
    pages_per_image: int = 1

    def __post_init__(self) -> None:
        if (self.share is None) == (self.tokens is None):
            raise ConfigError(
                f"image budget: got share={self.share!r} and tokens={self.tokens!r}. Allowed: one of them. Set one."
            )
        if self.tokens is not None:
            check_int("image budget tokens", self.tokens, 0, None)
        share = self.share
        is_number = isinstance(share, int | float) and not isinstance(share, bool)
        if share is not None and not (is_number and 0 <= share <= 1):
            raise ConfigError(
                f"image budget share: got {share!r}. Allowed: 0..1. Pass a share of the image tokens."
            )
        check_int("pages_per_image", self.pages_per_image, 0, None)

    @property
    def is_whole(self) -> bool:
        """Whether every image token may be read, however many there are."""
        return self.share is not None and self.share >= 1

    def limit(self, num_tokens: int) -> int:
        """Returns how many of so many image tokens may be read."""
        if self.tokens is not None:
            return min(self.tokens, num_tokens)
        assert self.share is not None, "checked when made"
        # a share like 0.07 of 100 tokens is 7, not 7.000000000000001
        return min(num_tokens, int(self.share * num_tokens + 1e-6))


def choose_pages(
    scores: torch.Tensor, sizes: Sequence[int], images: Sequence[int], budget: ImageBudget
) -> torch.Tensor:
    """Returns which pages to read, bool [P].

    First the best `pages_per_image` of each image, then the others by score, best first, while they fit: a page that
    is too large for what is left is passed over. Among equals the first comes first.

    Args:
        scores: [P], higher is better; comparable across images.
        sizes: tokens of each page.
        images: image of each page.
        budget: of the row.
    """
    limit = budget.limit(sum(sizes))
    chosen = torch.zeros(len(sizes), dtype=torch.bool)
    if limit == 0:
        return chosen
    if limit >= sum(sizes):
        return ~chosen
    order: list[int] = scores.float().argsort(descending=True, stable=True).tolist()
    kept = dict.fromkeys(images, 0)
    left = limit
    for page in order:
        if kept[images[page]] < budget.pages_per_image:
            kept[images[page]] += 1
            chosen[page] = True
            left -= sizes[page]
    for page in order:
        if not chosen[page] and sizes[page] <= left:
            chosen[page] = True
            left -= sizes[page]
    return chosen
