"""Chooses pages by score within a budget of tokens. Shapes: G layer groups, P pages; leading dimensions are steps."""

from __future__ import annotations

import torch


def choose(
    scores: torch.Tensor, counts: torch.Tensor, kept: torch.Tensor, budget: int | torch.Tensor
) -> torch.Tensor:
    """Returns which pages to read, bool [..., G, P].

    Kept pages always are. The others follow by score a token, best first, while they fit: a page that is too large
    for what is left is passed over. Without sizes to tell apart that is top-k.

    Args:
        scores: [..., G, P] log of the mass of each page, up to a constant a group.
        counts: long [P] tokens of each page.
        kept: bool [..., P] or [..., G, P]: pages that are read in any case, within the budget or not.
        budget: tokens in all, those of the kept pages included; or long [...] by step.
    """
    kept = kept.expand(scores.shape) if kept.ndim == scores.ndim else kept[..., None, :]
    kept = kept.expand(scores.shape)
    density = scores - counts.clamp(min=1).log().to(scores.dtype)
    density = density.masked_fill(kept, float("inf"))
    density = density.masked_fill(counts.expand(scores.shape) == 0, float("-inf"))
    order = density.argsort(dim=-1, descending=True, stable=True)
    sizes = counts.expand(scores.shape).gather(-1, order)
    limit = torch.as_tensor(budget, device=scores.device)
    limit = limit[..., None, None] if limit.ndim else limit
    fits = (sizes.cumsum(-1) <= limit) | kept.gather(-1, order)
    if int(counts.max()) != int(counts.min()):
        fits = _pass_over(sizes, fits, limit)
    fits &= density.gather(-1, order) > float("-inf")
    return torch.zeros_like(fits).scatter(-1, order, fits)


def _pass_over(sizes: torch.Tensor, fits: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    # From the first page that does not fit on, smaller ones may: less than that page's tokens are at stake, so a
    # handful of rounds fills it.
    while True:
        left = limit - (sizes * fits).sum(-1, keepdim=True)
        more = ~fits & (sizes > 0) & (sizes <= left)
        first = more & (more.cumsum(-1) == 1)
        if not bool(first.any()):
            break
        fits = fits | first
    return fits
