"""Medusa's typical acceptance: keeps drafted tokens that the target finds likely enough. Lossy: it changes the text.

A token x after a node is kept where p(x) > min(epsilon, delta * exp(-H)), with p the softmax of the node's scores and H
its entropy: the less certain the target is, the more it lets pass. Temperature is in the scores already. Only nodes of
the tree are looked at, so that no padding can be taken for a token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from oval_spec.token_tree import TokenTree
from oval_spec.verifier import AcceptResult, ScoresOf


class TypicalVerifier:
    """Accepts the longest path of typical tokens; of equally long ones the most probable.

    Without sampling the scores have no temperature: what is typical is judged at 1, and the token after the path is the
    most likely one.

    Args:
        threshold: epsilon: a token that is more probable than this always passes.
        alpha: delta: lowers the bar to this share of exp(-H).
        choose: picks the token after the accepted path from its scores [V].
    """

    name = "typical"
    is_lossless = False

    def __init__(
        self, *, threshold: float, alpha: float, choose: Callable[[torch.Tensor], int]
    ) -> None:
        self._threshold = threshold
        self._alpha = alpha
        self._choose = choose

    def accept(self, tree: TokenTree, scores_of: ScoresOf) -> AcceptResult:
        """Returns the accepted path and the token after it."""
        log_worth = {0: 0.0}  # of accepted nodes: the sum of log p along the path
        scores = {0: scores_of(0)}
        for node, children in enumerate(tree.children):
            if node not in log_worth or not children:
                continue
            if node not in scores:
                scores[node] = scores_of(node)
            p = torch.softmax(scores[node].float(), dim=-1)
            entropy = -(p * torch.log(p + 1e-5)).sum()
            bar = min(self._threshold, self._alpha * float(torch.exp(-entropy)))
            for token, child in children.items():
                if float(p[token]) > bar:
                    log_worth[child] = log_worth[node] + float(torch.log(p[token]))
        best = max(log_worth, key=lambda node: (tree.depths[node], log_worth[node]))
        last = scores[best] if best in scores else scores_of(best)
        return AcceptResult(tree.path(best), self._choose(last))
