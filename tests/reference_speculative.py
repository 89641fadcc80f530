"""Drafters whose luck is known beforehand."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from oval_spec.drafter import Draft, DraftRequest
from oval_spec.token_tree import TokenTree


class ScriptedDrafter:
    """Knows the text to come, and proposes it, or something else, or both among random branches.

    Args:
        texts: by row: the whole text, prompt included, that the target will write.
        kind: `right`: a chain of right tokens; `wrong`: a chain that is wrong from its first token; `late`: right, then
            wrong; `tree`: a random tree in which the right path is hidden, of random length.
        vocab: tokens to choose from.
        depth: tokens in a row.
        needs_hidden: whether requests must carry hidden states.
    """

    name = "scripted"

    def __init__(
        self,
        texts: Mapping[int, Sequence[int]],
        kind: str,
        vocab: int,
        depth: int = 4,
        needs_hidden: bool = False,
    ) -> None:
        self.texts, self.kind, self.vocab, self.depth = texts, kind, vocab, depth
        self.needs_hidden = needs_hidden
        self.requests: list[DraftRequest] = []
        self.proposed: list[TokenTree] = []
        self._random = random.Random(3)

    def reset(self) -> None:
        """Begins with the same chances again."""
        self._random.seed(3)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Returns a tree for each request."""
        self.requests += requests
        trees = [self._tree(request) for request in requests]
        self.proposed += trees
        return [Draft(tree) for tree in trees]

    def _tree(self, request: DraftRequest) -> TokenTree:
        place = len(request.ids)
        right = list(self.texts.get(request.row, ())[place : place + self.depth])
        root = request.ids[-1]
        if self.kind == "right":
            return TokenTree.chain([root, *right])
        if self.kind == "wrong":
            return TokenTree.chain([root, *(self._other(token) for token in right or [5])])
        if self.kind == "late":
            cut = self._random.randint(0, len(right))
            return TokenTree.chain([root, *right[:cut], *map(self._other, right[cut:])])
        return self._random_tree(root, right[: self._random.randint(0, len(right))])

    def _random_tree(self, root: int, right: Sequence[int]) -> TokenTree:
        tokens, parents, known = [root], [-1], {}

        def add(parent: int, token: int) -> int:
            if (parent, token) not in known:
                known[parent, token] = len(tokens)
                tokens.append(token)
                parents.append(parent)
            return known[parent, token]

        path, rest = 0, list(right)
        for _ in range(12):
            if rest and self._random.random() < 0.5:
                path = add(path, rest.pop(0))
            else:
                add(self._random.randrange(len(tokens)), self._random.randrange(5, self.vocab))
        return TokenTree(tuple(tokens), tuple(parents))

    def _other(self, token: int) -> int:
        return 5 + (token - 5 + self._random.randint(1, self.vocab - 6)) % (self.vocab - 5)
