"""Tokens a step that heads would emit on held-out answers: drafted trees are held against what the target said.

No target runs: an answer is the target's own greedy text, so the walk down a tree is known. F nodes asked, K heads.
"""

from __future__ import annotations

import torch

from oval_spec.heads.base import DraftHeads
from oval_spec.token_tree import TokenTree
from oval_spec.training.examples import MISSING, HeadExamples
from oval_spec.training.loss import Tick
from oval_spec.tree_search import Frontier, grow_trees
from oval_spec.tree_shape import TOPK


@torch.no_grad()
def grown_tau(
    heads: DraftHeads, examples: HeadExamples, num_nodes: int, tick: Tick
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the steps and the emitted tokens of each answer, int64 [answers] each, where trees grow by probability.

    Args:
        heads: bound, in evaluation mode.
        examples: held-out answers, on the heads' device.
        num_nodes: nodes of a tree, the root included.
        tick: told how far the answers are.
    """
    firsts, lengths = examples.firsts(), examples.lengths
    place = torch.zeros_like(lengths)
    steps, emitted = torch.zeros_like(lengths), torch.zeros_like(lengths)
    while bool((place < lengths).any()):
        going = (place < lengths).nonzero()[:, 0]
        rows = firsts[going] + place[going]
        for answer, row, tree in zip(
            going.tolist(), rows.tolist(), _grow(heads, examples, rows, num_nodes), strict=True
        ):
            left = int(lengths[answer] - place[answer])
            taken = _accepted(tree, examples.tokens[row + 1 : row + left].tolist())
            steps[answer] += 1
            emitted[answer] += taken + 1
            place[answer] += taken + 1
        tick("drafting", int(place.sum()), len(examples))
    return steps, emitted


def _grow(
    heads: DraftHeads, examples: HeadExamples, rows: torch.Tensor, num_nodes: int
) -> list[TokenTree]:
    context = examples.paths(rows, heads.context, 1)
    before = heads.embed(context.clamp(min=0)) * (context != MISSING)[..., None]
    carried = heads.start(examples.hidden[rows].to(heads.dtype), before[:, : heads.context])

    def expand(frontier: Frontier) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal carried
        depth = frontier.paths.shape[1] - 1
        last = heads.embed(frontier.paths[:, -1].to(rows.device))
        carried = heads.step(carried[frontier.parents.to(rows.device)], last, depth)
        logits = heads.logits(heads.read(carried, depth), depth).float()
        best = logits.log_softmax(-1).topk(min(TOPK, logits.shape[-1]))
        return heads.to_target(best.indices).cpu(), best.values.cpu()

    roots = examples.tokens[rows].tolist()
    count = len(roots)
    return grow_trees(roots, expand, [num_nodes] * count, [heads.num_heads] * count)


def _accepted(tree: TokenTree, said: list[int]) -> int:
    """Returns how many tokens of what the target said after the root lie on a path of the tree."""
    node = 0
    for taken, token in enumerate(said):
        if token not in tree.children[node]:
            return taken
        node = tree.children[node][token]
    return len(said)
