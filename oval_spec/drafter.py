"""Drafters: what proposes a tree of tokens before each forward of the target. Shapes: C hidden size, S states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from oval_spec.token_tree import TokenTree


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a drafter is told of one row.

    Attributes:
        row: number of the row; the same text keeps it from step to step.
        ids: the text so far, without padding: the prompt, then what was emitted. The last token is the root of the
            tree: chosen, not cached yet.
        hidden: last hidden state [C], after the final norm, of the token before the root, from which the root was
            predicted; None unless the drafter `needs_hidden`.
        max_depth: nodes that are deeper can never count; 0 where only the root fits.
        max_nodes: nodes that one forward should verify, the root included.
    """

    row: int
    ids: Sequence[int]
    hidden: torch.Tensor | None
    max_depth: int
    max_nodes: int


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter proposes for one row.

    Attributes:
        tree: the tokens.
        states: [S, C] hidden states that the drafter expects at tokens to come, for what predicts pages; None where it
            has none.
        in_target_space: whether the target's router can read these states; a draft model's are its own.
        chances: by node, how likely the drafter thinks it that the text goes through it, no less than any node after
            it; the root's is 1. None where it cannot tell.
    """

    tree: TokenTree
    states: torch.Tensor | None = None
    in_target_space: bool = True
    chances: tuple[float, ...] | None = None


class Drafter(Protocol):
    """Proposes tokens. One drafter serves one generation at a time; `reset` begins the next."""

    name: str

    @property
    def needs_hidden(self) -> bool:
        """Whether requests must carry the target's hidden state."""
        ...

    def reset(self) -> None:
        """Forgets every row."""
        ...

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Returns a draft for each request, in order. Rows that have ended are not asked for."""
        ...


class NullDrafter:
    """Proposes nothing: one token a forward, as plain decoding."""

    name = "none"
    needs_hidden = False

    def reset(self) -> None:
        """Does nothing."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Returns trees that are a root alone."""
        return [Draft(TokenTree.chain(request.ids[-1:])) for request in requests]
