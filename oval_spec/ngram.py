"""Drafts from the text itself: what followed the last tokens where they stood before (prompt lookup). No model.

The longest run of last tokens that occurs earlier decides; what followed it there, up to `depth` tokens, is drafted.
Where it was followed by different things they become branches. How likely each is, is reckoned as prediction by partial
matching does (method C, Moffat 1990): its share of what followed, less what new things would get. Of equals that is first
which came latest, since a text keeps to its present subject.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oval_core.errors import ConfigError
from oval_spec.drafter import Draft, DraftRequest
from oval_spec.token_tree import TokenTree

MAX_MATCHES = 32
"""Latest occurrences of a run that are looked at: bounds a step's work in a text that repeats itself."""
NEWNESS = (2.5, 0.8, 0.5, 0.5, 0.4, 0.4, 0.2, 0.1)
"""By length of the run, 1, 2, ...: what one kind of follower leaves for tokens that never followed, in occurrences.
Read off SmolLM2's own answers to questions, summaries and translations (docs/decisions.md 35): one follower that came
once is right in 29, 56, 67, 66, 71, 69, 83 and 90 of 100 cases."""
LEAST_CHANCE = 0.03
"""Nodes that are less likely are not drafted."""


@dataclass(frozen=True, slots=True)
class Found:
    """What stood after the last tokens before.

    Attributes:
        tree: best nodes first; the root alone where the last tokens are new.
        chances: by node, how likely it is that the text goes through it; the root's is 1.
        length: tokens of the run that was found; 0 for none.
    """

    tree: TokenTree
    chances: tuple[float, ...]
    length: int


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
        found = [self.find(request) for request in requests]
        return [Draft(each.tree, chances=each.chances) for each in found]

    def find(self, request: DraftRequest) -> Found:
        """Returns what one row's last tokens were followed by."""
        index = self._rows.get(request.row)
        if index is None or not index.fits(request.ids):
            index = self._rows[request.row] = _RunIndex(self._lengths)
        index.extend(request.ids)
        length, places = index.earlier()
        depth = min(self._depth, request.max_depth)
        followers = [index.ids[place : place + depth] for place in places]
        nodes = _likeliest(followers, length, request.max_nodes - 1)
        place = {number: i for i, (number, *_) in enumerate(nodes, start=1)}
        tokens = (token for _, _, token, _ in nodes)
        parents = (place.get(parent, 0) for _, parent, _, _ in nodes)
        tree = TokenTree((request.ids[-1], *tokens), (-1, *parents))
        return Found(tree, (1.0, *(chance for *_, chance in nodes)), length)


class _RunIndex:
    """One row's text, and where each run of tokens in it ended: for a run of n tokens the places are a linked list.

    Most long runs of a text come once. Runs of n + 1 tokens are therefore noted from the second time on that their last n
    came, the first time's being noted late: a long text then takes about two entries a token, not one a length.

    Args:
        lengths: of the runs, longest first, without gaps.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.ids: list[int] = []
        self._ascending = lengths[::-1]
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
        for before in self._before.values():
            before += [0] * (len(self.ids) - start)
        for end in range(start + 1, len(self.ids) + 1):
            self._note(end)

    def _note(self, end: int) -> None:
        """Takes note of the runs that end at `end`, shortest first, up to the first one that is new."""
        ids = self.ids
        for n in self._ascending:
            if end < n:
                return
            latest, before = self._latest[n], self._before[n]
            run = tuple(ids[end - n : end])
            place = latest.get(run, 0)
            latest[run] = end
            if not place:
                return
            before[end] = place
            longer = self._latest.get(n + 1)
            if longer is not None and not before[place] and place > n:  # it had come once
                longer[tuple(ids[place - n - 1 : place])] = place

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


def _likeliest(
    followers: Sequence[Sequence[int]], length: int, count: int
) -> list[tuple[int, int, int, float]]:
    """Returns the likeliest `count` nodes of the followers' tree: (number, parent's number, token, chance); the root is 0.

    Nodes are numbered in the order of the followers, latest first, and a node is less likely than its parent, so that
    the best ones are a tree and parents come first among them.
    """
    numbers: dict[tuple[int, int], int] = {}
    passed = [0]
    for tokens in followers:
        node = 0
        for token in tokens:
            node = numbers.setdefault((node, token), len(passed))
            if node == len(passed):
                passed.append(0)
            passed[node] += 1
    by_parent: dict[int, list[tuple[int, int]]] = {}
    for (parent, token), node in numbers.items():
        by_parent.setdefault(parent, []).append((node, token))
    chances, depths = [1.0] * len(passed), [0] * len(passed)
    kept = []
    for parent, children in sorted(by_parent.items()):  # a parent's number is smaller
        depth = depths[parent]
        newness = NEWNESS[min(length + depth, len(NEWNESS)) - 1] * len(children)
        seen = sum(passed[node] for node, _ in children) + newness
        for node, token in children:
            depths[node] = depth + 1
            chances[node] = chances[parent] * passed[node] / seen
            if chances[node] >= LEAST_CHANCE:
                kept.append((node, parent, token, chances[node]))
    kept.sort(key=lambda own: (-own[3], own[0]))
    return kept[: max(0, count)]
