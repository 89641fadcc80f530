"""What a policy's router says of pages at other hidden states than the newest: those of drafted tokens. Changes nothing.

Shapes: S states, C hidden size, G layer groups, P pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from oval_core.pages import Page, SequencePages
from oval_core.routing.routed import RoutedPolicy
from oval_core.routing.router import FILLS_BY
from oval_core.routing.view import PageView

__all__ = ["ForeseenPages", "foreseen_scores", "reads_hidden"]


def reads_hidden(policy: RoutedPolicy) -> bool:
    """Whether the policy's router can tell states apart."""
    return "hidden" in policy._router.needs


@dataclass(frozen=True, slots=True)
class ForeseenPages:
    """Router's scores of the pages of one row's committed tokens, for tokens to come.

    Attributes:
        pages: [P], in the order of the sequence.
        newest: [G, P] by the newest committed token's hidden state.
        states: [S, G, P] by other states; None where there were none, or the router reads no hidden states.
    """

    pages: tuple[Page, ...]
    newest: torch.Tensor
    states: torch.Tensor | None


@torch.no_grad()
def foreseen_scores(
    policy: RoutedPolicy,
    sequences: Sequence[SequencePages],
    row: int,
    states: torch.Tensor | None = None,
) -> ForeseenPages | None:
    """Returns what the router says of a row's pages as things are; None where nothing is known of the row yet.

    What was seen of pages so far is the same for all states; only what the router reads of hidden states differs.

    Args:
        policy: whose memory and router; between two forwards.
        sequences: of its cache.
        row: which of them.
        states: [S, C] in the space of the model's last hidden states.
    """
    if row >= len(policy._rows):
        return None
    rows, scored = policy._rows, policy._counters.summary_tokens
    policy._rows = [memory.ahead() for memory in rows]
    try:
        view = _view(policy, sequences[row], row)
        if view is None:
            return None
        pages, seen = view
        score = policy._router.score
        by_state = None
        if states is not None and reads_hidden(policy):
            by_state = score(replace(seen, hidden=states.float().cpu())).float().cpu()
        return ForeseenPages(tuple(pages), score(seen).float().cpu(), by_state)
    finally:
        policy._rows, policy._counters.summary_tokens = rows, scored


def _view(policy: RoutedPolicy, seq: SequencePages, row: int) -> tuple[list[Page], PageView] | None:
    memory = policy._rows[row]
    pages = memory.settle(seq)
    if memory.book is not None:
        memory.book.refresh(seq, policy._summaries.read_keys)
    if not policy._is_known(memory):
        return None
    signals: dict[str, torch.Tensor] = {}
    if policy._asked:
        assert memory.book is not None, "a signal without summaries"
        assert memory.queries is not None, "a signal without a query"
        signals = policy._log_masses(memory.book, memory.queries, len(pages), None)
    if "filled_history" in policy._router.needs:
        memory.fill(signals[FILLS_BY].exp())
    return pages, policy._view(row, pages, signals, memory.history)
