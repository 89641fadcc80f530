"""Features of how far back a page lies: decay, waves and logarithm. Knows no pages, only distances.

Shapes: P pages, F features. The article decays and rotates by the page index; a page here has any size, so distance
is measured in tokens and divided by a nominal page size.
"""

from __future__ import annotations

import math

import torch

from oval_core.errors import ConfigError

DECAY_PAGES = 32.0
"""Pages after which the decay has fallen to 1/e."""

NOMINAL_PAGE_TOKENS = 16.0
"""Tokens that count as one page of distance."""

NUM_FREQUENCIES = 4
NUM_FEATURES = 2 * NUM_FREQUENCIES + 2
"""F: decayed cosines, decayed sines, the decay itself, logarithm of the distance."""

_WAVE_BASE = 100.0  # the slowest of four waves takes 199 pages: by then the decay is under .002


def decay_waves(page_distance: torch.Tensor, num_frequencies: int) -> torch.Tensor:
    """Returns exp(-d/32) cos(w d), then exp(-d/32) sin(w d), for falling frequencies w from 1 on, as RoPE has them.

    Args:
        page_distance: float [..., P] pages back, at least 0.
        num_frequencies: how many w; the result is float32 [..., P, 2 * num_frequencies].
    """
    distance = page_distance.float()[..., None]
    steps = torch.arange(num_frequencies, device=distance.device) / num_frequencies
    angle = distance * _WAVE_BASE**-steps
    return torch.cat((angle.cos(), angle.sin()), -1) * (-distance / DECAY_PAGES).exp()


def decay_features(
    distance_tokens: torch.Tensor, page_tokens: float = NOMINAL_PAGE_TOKENS
) -> torch.Tensor:
    """Returns features [..., P, F] of the distance of pages, float32, all within about -1..2.

    Far beyond 32 pages only the logarithm still tells pages apart.

    Args:
        distance_tokens: [..., P] tokens back to the last token of each page, at least 0 (`PageView.distance`).
        page_tokens: tokens of a nominal page; features of page sizes that differ agree if this stays the same.
    """
    if not (page_tokens > 0 and math.isfinite(page_tokens)):
        raise ConfigError(
            f"page_tokens: got {page_tokens!r}. Allowed: a number above 0. Give the usual page size."
        )
    distance = distance_tokens.float() / page_tokens
    decay = (-distance / DECAY_PAGES).exp()
    # over its value at the decay length, so that it weighs as much as the other features
    far = distance.log1p() / math.log1p(DECAY_PAGES)
    return torch.cat(
        (decay_waves(distance, NUM_FREQUENCIES), torch.stack((decay, far), -1)), dim=-1
    )
