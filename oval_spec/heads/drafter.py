"""Drafts with heads: a token tree a row from the hidden state before the root, all rows in one batch.

Shapes: B rows, C hidden size, V' draft tokens, F frontier nodes a row, J children a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oval_core.errors import ConfigError
from oval_spec.drafter import Draft, DraftRequest
from oval_spec.heads.base import DraftHeads, check_whole
from oval_spec.heads.paths import Paths
from oval_spec.heads.tree_growth import Growth
from oval_spec.token_tree import TokenTree
from oval_spec.tree_shape import Path, TreeShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Beam:
    """How wide a tree grows before its likeliest nodes are kept.

    Attributes:
        frontier: F, nodes of a level that get children.
        children: J, children that such a node gets.
        least_mass: growing ends once the probabilities of the nodes that would get children sum to less in every row:
            a bound on the tokens that one more level can add. 0 never ends early; 0.3 cost no accepted token of
            SmolLM2's on five prompts, and saved time.
    """

    frontier: int = 8
    children: int = 8
    least_mass: float = 0.3

    def __post_init__(self) -> None:
        check_whole("frontier", self.frontier)
        check_whole("children", self.children)
        if not 0 <= self.least_mass <= 1:
            raise ConfigError(
                f"drafter of heads: got least_mass {self.least_mass!r}. Allowed: 0 to 1. Give a probability."
            )


class HeadsDrafter:
    """Drafts trees from bound heads.

    With a shape, the tree has its nodes: rank r of a node is the r-th likeliest token there. Without one it grows by the
    heads' own probabilities: level by level the likeliest nodes get children, and of all nodes the likeliest are kept.
    A node's probability is the product along its path, so whatever is kept has all that lies before it.

    `Draft.states` are the expected hidden states [S, C] along the first path of each level, the likeliest one (with a
    shape: of the lowest ranks), the root's first.
    """

    name = "medusa"
    needs_hidden = True

    def __init__(
        self, heads: DraftHeads, shape: TreeShape | None = None, *, beam: Beam | None = None
    ) -> None:
        """Keeps the heads.

        Args:
            heads: bound, in evaluation mode, on the model's device.
            shape: nodes of every tree; None to grow each one.
            beam: width while growing.
        """
        rows, _ = heads.lm_head_rows()  # refuses heads that are not bound
        if shape is not None:
            widest = 1 + max((max(path) for path in shape.paths), default=0)
            if widest > len(rows):
                raise ConfigError(
                    f"drafter of heads: got a tree of {widest} ranks and {len(rows)} draft tokens. Allowed: up to as many "
                    "ranks as tokens. Use a narrower tree."
                )
        self.heads = heads
        self.shape = shape
        self.beam = beam or Beam()

    def reset(self) -> None:
        """Does nothing: heads remember no text."""

    @torch.no_grad()
    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Returns a draft for each request, in order."""
        drafts = [Draft(TokenTree.chain(request.ids[-1:])) for request in requests]
        rows = [i for i, r in enumerate(requests) if r.max_depth > 0 and r.max_nodes > 1]
        if rows:
            asked = [requests[row] for row in rows]
            made = self._grow(asked) if self.shape is None else self._fill(asked, self.shape)
            for row, draft in zip(rows, made, strict=True):
                drafts[row] = draft
        return drafts

    def _depth(self, requests: Sequence[DraftRequest]) -> int:
        return min(self.heads.num_heads, max(request.max_depth for request in requests))

    def _grow(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Grows trees by probability."""
        heads, depth = self.heads, self._depth(requests)
        paths = Paths(heads, requests, depth)
        growth = Growth(len(requests), self.beam.frontier, heads.device)
        firsts = []
        for k in range(depth):
            states, logits = paths.step(k)
            firsts.append(paths.first(states))
            best, tokens = logits.topk(min(self.beam.children, logits.shape[-1]), -1)
            scores = best - logits.logsumexp(-1, keepdim=True)
            frontier = growth.add(scores, heads.to_target(tokens))
            if k + 1 == depth or (self.beam.least_mass and growth.mass() < self.beam.least_mass):
                break
            paths.follow(frontier.parents, frontier.tokens)
        depths = [request.max_depth for request in requests]
        grown = growth.trees(
            [request.ids[-1] for request in requests],
            [request.max_nodes for request in requests],
            depths,
        )
        states = torch.stack(firsts, 1)
        return [
            Draft(tree, own[:depth], chances=chances)
            for (tree, chances), own, depth in zip(grown, states, depths, strict=True)
        ]

    def _fill(self, requests: Sequence[DraftRequest], shape: TreeShape) -> list[Draft]:
        """Fills a fixed shape, cut to what each row may have."""
        most = max(request.max_nodes for request in requests)
        widest = shape.first(most).cut(self._depth(requests))
        ranked, states = self._rank(requests, widest)
        trees, depths = [], []
        for row, request in enumerate(requests):
            own = shape.first(request.max_nodes).cut(min(request.max_depth, widest.depth))
            by_node = [ranked[path][row] if path in ranked else [] for path in ((), *own.paths)]
            trees.append(own.fill(request.ids[-1], by_node))
            depths.append(own.depth)
        return [
            Draft(tree, own[:depth]) for tree, own, depth in zip(trees, states, depths, strict=True)
        ]

    def _rank(
        self, requests: Sequence[DraftRequest], shape: TreeShape
    ) -> tuple[dict[Path, list[list[int]]], torch.Tensor]:
        """Returns the tokens by rank after each inner node, by path and row; and the states [B, depth, C]."""
        heads, B = self.heads, len(requests)
        paths = Paths(heads, requests, shape.depth)
        levels = _inner_levels(shape)
        ranked: dict[Path, list[list[int]]] = {}
        firsts = []
        for k, frontier in enumerate(levels):
            states, logits = paths.step(k)
            firsts.append(paths.first(states))
            width = 1 + max(path[-1] for path in shape.paths if len(path) == k + 1)
            tokens = heads.to_target(logits.topk(width, -1).indices)
            tokens = tokens.view(B, -1, width).expand(B, len(frontier), width)
            lists = tokens.tolist()
            ranked.update({path: [row[i] for row in lists] for i, path in enumerate(frontier)})
            if k + 1 < len(levels):
                place = {path: i for i, path in enumerate(frontier)}
                parents = torch.tensor([place[path[:-1]] for path in levels[k + 1]])
                ranks = torch.tensor([path[-1] for path in levels[k + 1]])
                parents, ranks = parents.to(tokens.device), ranks.to(tokens.device)
                paths.follow(parents.expand(B, -1), tokens[:, parents, ranks])
        return ranked, torch.stack(firsts, 1)


def _inner_levels(shape: TreeShape) -> list[list[Path]]:
    """Returns the nodes that have children, by depth, in the order of ranks."""
    inner = sorted({path[:-1] for path in shape.paths})
    return [[path for path in inner if len(path) == depth] for depth in range(shape.depth)]
