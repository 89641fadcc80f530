"""What a layer's own query spends of a budget that a router left it. Shapes: W queries, H query heads, P pages, D head dim."""

from __future__ import annotations

import torch

from oval_core.routing.choose import choose
from oval_core.routing.key_book import KeyBook
from oval_core.routing.key_signals import group_log_mass
from oval_core.routing.router import FILLS_BY


def look_again(
    book: KeyBook,
    query: torch.Tensor,
    place: int,
    read: torch.Tensor,
    counts: torch.Tensor,
    budget: int,
) -> torch.Tensor:
    """Returns the unread pages to which sketches give most mass, within what is left of the budget; bool [P].

    FreeKV (arXiv 2505.13109) corrects a selection that the previous query made where the query has changed; here each
    layer corrects always, with a part of the budget.

    Args:
        book: sketches of the pages.
        query: [W, H, D] of the layer, after RoPE.
        place: of the layer, in the book.
        read: bool [P] pages that the layer reads already.
        counts: long [P] tokens of each page.
        budget: tokens in all.
    """
    scores = book.scores(FILLS_BY, query, place).cpu()
    best = group_log_mass(scores[:, None], book.counts, [0]).amax(0)
    padded = best.new_full((1, len(read)), float("-inf"))
    padded[:, : best.shape[-1]] = best
    return choose(padded, counts, read, budget)[0] & ~read
