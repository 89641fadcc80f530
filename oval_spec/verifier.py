"""What a verifier is given and gives back: how much of a tree the target's own scores accept. V vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from oval_spec.token_tree import TokenTree

ScoresOf = Callable[[int], torch.Tensor]
"""Returns the float32 scores [V] of the token after a node, processed with the path to the node as its prefix."""


@dataclass(frozen=True, slots=True)
class AcceptResult:
    """What one row keeps of a tree.

    Attributes:
        nodes: accepted nodes, the root first: a path of the tree, ascending.
        next_token: token after the last of them, chosen by the target; the root of the next tree.
    """

    nodes: tuple[int, ...]
    next_token: int


class Verifier(Protocol):
    """Walks a tree from the root by the target's scores."""

    name: str
    is_lossless: bool

    def accept(self, tree: TokenTree, scores_of: ScoresOf) -> AcceptResult:
        """Returns the accepted path and the token after it."""
        ...
