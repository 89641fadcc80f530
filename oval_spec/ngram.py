"""Drafts from the text itself: what followed the last tokens where they stood before (prompt lookup). No model.

The longest run of last tokens that occurs earlier decides; what followed it there, up to `depth` tokens, is drafted.
Where it was followed by different things they become branches: what followed more often first, since its share is the
best guess of its probability; of equals what followed latest, since a text keeps to its present subject.
"""

from __future__ import annotations

from collections.abc import Sequence

from oval_core.errors import ConfigError
from oval_spec.drafter import Draft, DraftRequest
from oval_spec.token_tree import TokenTree

MAX_MATCHES = 32
"""Latest occurrences of a run that are looked at: bounds a step's work in a text that repeats itself."""


class NgramDrafter:
    """Proposes what followed the last tokens earlier in the row.

    Args:
        ngram_max: longest run of last tokens that is looked for.
        ngram_min: shortest.
        depth: tokens that are proposed in a row.
    """

    name = "ngram"
    needs_hidden = False

    def __init__(self, *, ngram_max: int, ngram_min: int, depth: int) -> None:
        if not 1 <= ngram_min <= ngram_max or depth < 1:
            raise ConfigError(
                f"ngram drafter: got ngram_min {ngram_min}, ngram_max {ngram_max}, depth {depth}. Allowed: whole numbers "
                "from 1, ngram_min up to ngram_max. Correct them."
            )
        self.ngram_max = ngram_max
        self._lengths = range(ngram_max, ngram_min - 1, -1)
        self._depth = depth
        self._rows: dict[int, _RunIndex] = {}

    def reset(self) -> None:
        """Forgets every row."""
        self._rows.clear()

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Returns a tree for each request: the root alone where the last tokens are new."""
        return [Draft(self.propose(request)[0]) for request in requests]

    def propose(self, request: DraftRequest) -> tuple[TokenTree, int]:
        """Returns one row's tree, best nodes first, and the length of the run that was found; 0 for none."""
        index = self._rows.get(request.row)
        if index is None or not index.fits(request.ids):
            index = self._rows[request.row] = _RunIndex(self._lengths)
        index.extend(request.ids)
        length, places = index.earlier()
        depth = min(self._depth, request.max_depth)
        followers = [index.ids[place : place + depth] for place in places]
        return _most_frequent(request.ids[-1], followers, request.max_nodes), length


class _RunIndex:
    """One row's text, and where each run of tokens in it ended: for a run of n tokens the places are a linked list."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.ids: list[int] = []
        self._latest: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in lengths}
        # [n][e]: the end before e of the run of n tokens that ends at e; 0 for none. A run ends where the next begins.
        self._before: dict[int, list[int]] = {n: [0] for n in lengths}

    def fits(self, ids: Sequence[int]) -> bool:
        """Whether `ids` goes on from the text so far: a whole comparison, as fast as a copy of the list."""
        begin = ids[: len(self.ids)]
        return (begin if isinstance(begin, list) else list(begin)) == self.ids

    def extend(self, ids: Sequence[int]) -> None:
        """Takes note of what `ids` has beyond the text so far."""
        start = len(self.ids)
        self.ids += ids[start:]
        for n, latest in self._latest.items():
            before = self._before[n]
            for end in range(start + 1, len(self.ids) + 1):
                if end < n:
                    before.append(0)
                    continue
                run = tuple(self.ids[end - n : end])
                before.append(latest.get(run, 0))
                latest[run] = end

    def earlier(self) -> tuple[int, list[int]]:
        """Returns the length of the longest run of last tokens that ended earlier, and where, latest first."""
        for n, before in self._before.items():
            place = before[-1]
            places: list[int] = []
            while place and len(places) < MAX_MATCHES:
                places.append(place)
                place = before[place]
            if places:
                return n, places
        return 0, []


def _most_frequent(root: int, followers: Sequence[Sequence[int]], max_nodes: int) -> TokenTree:
    # Nodes are made in the order of the followers, latest first. A node is passed at least as often as its children
    # and is made before them, so that the best nodes are a tree, and parents come first among them.
    nodes: dict[tuple[int, int], int] = {}
    passed: list[int] = [0]
    for tokens in followers:
        node = 0
        for token in tokens:
            node = nodes.setdefault((node, token), len(passed))
            if node == len(passed):
                passed.append(0)
            passed[node] += 1
    keys = list(nodes)
    best = sorted(range(1, len(passed)), key=lambda node: (-passed[node], node))
    kept = [0, *best[: max(0, max_nodes - 1)]]
    place = {node: i for i, node in enumerate(kept)}
    return TokenTree(
        (root, *(keys[node - 1][1] for node in kept[1:])),
        (-1, *(place[keys[node - 1][0]] for node in kept[1:])),
    )
