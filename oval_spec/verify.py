"""Lossless verification: a tree never changes what the target says, only how many forwards it takes. V vocabulary.

At each node that is reached the target chooses its token as plain decoding would, once. If a child carries this token
the walk goes on there; if not, the token is what follows the accepted path. So every token has the target's own
distribution, whatever was drafted. (Trying the children one by one, each with a draw of its own, would accept too much.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from oval_core.speculation_config import SpeculationConfig
from oval_spec.token_tree import TokenTree
from oval_spec.typical import TypicalVerifier
from oval_spec.verifier import AcceptResult, ScoresOf, Verifier


class GreedyVerifier:
    """Takes the token with the highest score; of equal ones the one that `torch.argmax` takes."""

    name = "greedy"
    is_lossless = True

    def accept(self, tree: TokenTree, scores_of: ScoresOf) -> AcceptResult:
        """Returns the path that greedy decoding would have taken, and its next token."""
        return _walk(tree, lambda node: int(scores_of(node).argmax()))


class SamplingVerifier:
    """Draws the token from the softmax of the scores, once a node.

    Args:
        generator: where the draws come from; None for torch's own.
    """

    name = "sampling"
    is_lossless = True

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self._generator = generator

    def accept(self, tree: TokenTree, scores_of: ScoresOf) -> AcceptResult:
        """Returns a path and a next token that are distributed as plain sampling's."""
        return _walk(tree, lambda node: draw(scores_of(node), self._generator))


def draw(scores: torch.Tensor, generator: torch.Generator | None) -> int:
    """Returns one token drawn from the softmax of `scores` [V]."""
    return int(torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=generator))


def create_verifier(
    config: SpeculationConfig, do_sample: bool, generator: torch.Generator | None = None
) -> Verifier:
    """Returns the verifier that `config.verification` names, for sampling or for greedy decoding."""
    if config.verification == "typical":
        return TypicalVerifier(
            threshold=config.typical_threshold,
            alpha=config.typical_alpha,
            choose=(lambda scores: draw(scores, generator)) if do_sample else _argmax,
        )
    return SamplingVerifier(generator) if do_sample else GreedyVerifier()


def _argmax(scores: torch.Tensor) -> int:
    return int(scores.argmax())


def _walk(tree: TokenTree, choose: Callable[[int], int]) -> AcceptResult:
    nodes = [0]
    while True:
        token = choose(nodes[-1])
        child = tree.children[nodes[-1]].get(token)
        if child is None:
            return AcceptResult(tuple(nodes), token)
        nodes.append(child)
