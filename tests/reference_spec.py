"""Slow oracles for trees and verification, and two rules of Medusa's that are wrong, to show that tests see it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from oval_spec.ngram import NEWNESS
from oval_spec.token_tree import TokenTree
from oval_spec.verifier import AcceptResult, ScoresOf

Path = tuple[int, ...]


def reference_buffers(choices: Sequence[Path]) -> dict[str, list[list[int]] | list[int]]:
    """Medusa's tree buffers from their formulas, by loops over pairs of paths."""
    nodes: list[Path] = [(), *sorted(choices, key=lambda path: (len(path), path))]
    leaves = [p for p in nodes if not any(q[: len(p)] == p and q != p for q in nodes)]
    longest = max(map(len, nodes))
    retrieve = []
    for leaf in reversed(leaves):
        row = [nodes.index(leaf[:depth]) for depth in range(len(leaf) + 1)]
        retrieve.append(row + [-1] * (longest + 1 - len(row)))
    return {
        "medusa_attn_mask": [[int(p[: len(q)] == q) for q in nodes] for p in nodes],
        "tree_indices": [p[-1] + 10 * (len(p) - 1) + 1 if p else 0 for p in nodes],
        "medusa_position_ids": [len(p) for p in nodes],
        "retrieve_indices": retrieve,
    }


def worth(path: Path, accuracy: Sequence[Sequence[float]]) -> float:
    """Share of texts that go along a path of ranks, heads being independent."""
    return math.prod(accuracy[depth][rank] for depth, rank in enumerate(path))


def reference_best_tau(accuracy: Sequence[Sequence[float]], num_nodes: int) -> float:
    """The most that any tree of `num_nodes` nodes emits a step: every set of paths that is a tree is tried."""
    paths = [
        path
        for depth in range(1, len(accuracy) + 1)
        for path in itertools.product(*(range(len(row)) for row in accuracy[:depth]))
    ]
    best = 1.0
    for chosen in itertools.combinations(paths, min(num_nodes - 1, len(paths))):
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
            best = max(best, 1 + sum(worth(path, accuracy) for path in chosen))
    return best


def reference_grown(
    log_probs_of: Callable[[Path], dict[int, float]], root: int, num_nodes: int, max_depth: int
) -> dict[Path, float]:
    """Paths of tokens by log probability: all that there are, of which the most probable are kept."""
    values: dict[Path, float] = {(root,): 0.0}
    level: list[Path] = [(root,)]
    for _ in range(max_depth):
        below = []
        for path in level:
            for token, log_prob in log_probs_of(path).items():
                values[(*path, token)] = values[path] + log_prob
                below.append((*path, token))
        level = below
    kept = sorted(values, key=lambda path: -values[path])[:num_nodes]
    return {path: values[path] for path in kept}


def token_paths(tree: TokenTree) -> list[Path]:
    """The tokens from the root to each node."""
    return [tuple(tree.tokens[n] for n in tree.path(node)) for node in range(len(tree))]


class OneDrawAPath:
    """Medusa's `nucleus` rule, which is wrong: each path from the root to a leaf draws its own tokens.

    A node that several paths share is so tried several times, and accepted too often.
    """

    name = "one draw a path"
    is_lossless = False

    def __init__(self, draw: Callable[[torch.Tensor], int]) -> None:
        self._draw = draw

    def accept(self, tree: TokenTree, scores_of: ScoresOf) -> AcceptResult:
        """Returns the longest path that its own draws agree with; the first of equals."""
        best: tuple[int, ...] = (0,)
        for leaf in range(len(tree)):
            if tree.children[leaf]:
                continue
            kept = [0]
            for node in tree.path(leaf)[1:]:
                if self._draw(scores_of(kept[-1])) != tree.tokens[node]:
                    break
                kept.append(node)
            if len(kept) > len(best):
                best = tuple(kept)
        return AcceptResult(best, self._draw(scores_of(best[-1])))


def padded_greedy_count(tree: TokenTree, argmax: Sequence[int]) -> int:
    """Accepted tokens by Medusa's padded paths, which are wrong: a pad counts as token 0 with the last node's scores."""
    leaves = [node for node in range(len(tree)) if not tree.children[node]]
    longest = max(len(tree.path(leaf)) for leaf in leaves)
    counts = []
    for leaf in leaves:
        nodes = [*tree.path(leaf), *[-1] * (longest - len(tree.path(leaf)))]
        tokens = [tree.tokens[node] if node >= 0 else 0 for node in nodes]
        right = [argmax[nodes[i]] == tokens[i + 1] for i in range(longest - 1)]
        counts.append(len(list(itertools.takewhile(bool, right))))
    return max(counts)


def reference_typical(
    tree: TokenTree, scores: torch.Tensor, threshold: float, alpha: float
) -> tuple[int, ...]:
    """The accepted path by the rule as it is written, leaf by leaf; scores [N, V]."""
    p = torch.softmax(scores.double(), dim=-1)
    entropy = -(p * torch.log(p + 1e-5)).sum(-1)
    best, best_key = (0,), (0, 0.0)
    for leaf in range(len(tree)):
        kept, log_worth = [0], 0.0
        for node in tree.path(leaf)[1:]:
            above = tree.parents[node]
            chance = float(p[above, tree.tokens[node]])
            if not chance > min(threshold, alpha * math.exp(-float(entropy[above]))):
                break
            kept.append(node)
            log_worth += math.log(chance)
        if (len(kept) - 1, log_worth) > best_key or len(kept) - 1 > best_key[0]:
            best, best_key = tuple(kept), (len(kept) - 1, log_worth)
    return best


def reference_ngram(
    ids: Sequence[int], longest: int, shortest: int, depth: int, max_matches: int
) -> tuple[dict[Path, float], int]:
    """Chance of each token path after the last tokens, by looking at every place, and the run's length."""
    for n in range(longest, shortest - 1, -1):
        ends = (
            [end for end in range(n, len(ids)) if list(ids[end - n : end]) == list(ids[-n:])]
            if n <= len(ids)
            else []
        )
        if not ends:
            continue
        followers = [tuple(ids[end : end + depth]) for end in ends[::-1][:max_matches]]
        counts = Counter(own[:size] for own in followers for size in range(len(own) + 1))
        chances: dict[Path, float] = {(): 1.0}
        for path in sorted(counts, key=len):
            if not path:
                continue
            beside = [other for other in counts if other[:-1] == path[:-1] and other]
            run = min(n + len(path) - 1, len(NEWNESS))
            seen = sum(counts[other] for other in beside) + len(beside) * NEWNESS[run - 1]
            chances[path] = chances[path[:-1]] * counts[path] / seen
        del chances[()]
        return chances, n
    return {}, 0
