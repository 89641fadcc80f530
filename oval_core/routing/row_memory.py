"""What a policy remembers of one sequence between forwards: what its pages got, the newest queries, the key summaries.

Shapes: G layer groups, P pages, W watched tokens, Y watched layers, H query heads, D head dim.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oval_core.pages import Page, SequencePages
from oval_core.repaging import Repaged
from oval_core.routing.carried import Carrier
from oval_core.routing.cooccurrence import CooccurrenceGraph, heaviest
from oval_core.routing.key_book import KeyBook
from oval_core.routing.mass_watch import SeenRow
from oval_core.routing.page_embeddings import PageEmbeddings
from oval_core.routing.view import PageHistory


@dataclass(frozen=True, slots=True)
class Standing:
    """A selection that holds for some forwards.

    Attributes:
        page_ids: the chosen pages of each group.
        until: committed tokens from which on a new one is made.
    """

    page_ids: tuple[frozenset[int], ...]
    until: int


class RowMemory:
    """The past of one sequence. What a forward saw counts once it is known which of its tokens stay."""

    def __init__(
        self, num_groups: int, book: KeyBook | None, graph: CooccurrenceGraph | None
    ) -> None:
        self.book = book
        self.graph = graph
        self.embeddings: PageEmbeddings | None = None
        self.standing: Standing | None = None
        self.history = PageHistory.empty(num_groups, 0)
        self.queries: torch.Tensor | None = None
        """[Y, H, D] of the newest token; None when it is not known."""
        self._page_ids: list[int] = []
        self._is_filled = False  # whether the last step's gaps are
        self._newest = -1  # token of `queries`
        self._waiting: tuple[int, SeenRow] | None = None  # (first token, what was seen)

    def note(self, seen: SeenRow, num_committed: int) -> None:
        """Takes what the last tokens of a forward saw; some of them may be taken back before the next one."""
        self._waiting = (num_committed - seen.queries.shape[1], seen)

    def settle(self, seq: SequencePages) -> list[Page]:
        """Counts what the tokens that stayed have seen; returns the pages of committed tokens, in `history`'s order."""
        pages = [page for page in seq.pages if page.tokens[0] < seq.num_committed]
        ids = [page.page_id for page in pages]
        if ids != self._page_ids:
            self._align(ids)
        if self._waiting is not None:
            first, seen = self._waiting
            self._count(seen, first, min(seq.num_committed - first, seen.queries.shape[1]))
            self._waiting = None
        if self._newest != seq.num_committed - 1:  # the text was cut to before what was watched
            self.queries, self.standing = None, None
        return pages

    def fill(self, estimate: torch.Tensor) -> None:
        """Fills the history's gaps by `PageHistory.filled`, once a step: a forward that is tried again finds it done."""
        if not self._is_filled:
            self.history, self._is_filled = self.history.filled(estimate), True

    def repage(self, parts: Sequence[Repaged], num_known: int) -> None:
        """Carries over what is known to the pages that took tokens over; before this forward there were `num_known`."""
        past = Carrier(self._page_ids, parts, num_known)
        self.history, self._page_ids = past.history(self.history), past.ids
        if self._waiting is not None:
            first, seen = self._waiting
            self._waiting = (first, Carrier(seen.page_ids, parts).seen(seen))
        if self.graph is not None:
            self.graph.forget([page.page_id for part in parts for page in part.old])
        self.standing = None

    def history_mass(self, num_pages: int) -> torch.Tensor:
        """Returns the recent mass [P] of each page, mean over groups; 0 for pages beyond those with a history."""
        mass = self.history.fast.mean(0)
        return torch.nn.functional.pad(mass, (0, num_pages - len(mass)))

    def clone(self) -> RowMemory:
        """Returns an independent copy, for a fork."""
        twin = copy.copy(self)
        twin._page_ids = list(self._page_ids)
        twin.book = None if self.book is None else self.book.clone()
        twin.graph = None if self.graph is None else self.graph.copy()
        twin.embeddings = None  # made again when needed
        return twin

    def ahead(self) -> RowMemory:
        """Returns a memory to look ahead with: what it settles, some of it for drafts that may yet go, counts for nothing."""
        twin = copy.copy(self)
        twin.graph = None if self.graph is None else self.graph.copy()
        return twin

    def _align(self, ids: Sequence[int]) -> None:
        place = {page_id: i for i, page_id in enumerate(self._page_ids)}
        self.history = self.history.select(
            torch.tensor([place.get(i, -1) for i in ids], dtype=torch.long)
        )
        if self.graph is not None:
            ended = place.keys() - set(ids)
            if ended:
                self.graph.forget(ended)
        self._page_ids = list(ids)

    def _count(self, seen: SeenRow, first: int, num_kept: int) -> None:
        if num_kept <= 0:
            return
        place = {page_id: i for i, page_id in enumerate(self._page_ids)}
        known = [i for i, page_id in enumerate(seen.page_ids) if page_id in place]
        target = torch.tensor([place[seen.page_ids[i]] for i in known], dtype=torch.long)
        source = torch.tensor(known, dtype=torch.long)

        def spread(values: torch.Tensor) -> torch.Tensor:
            out = values.new_zeros(*values.shape[:-1], len(place))
            return out.index_copy_(-1, target, values.index_select(-1, source))

        mass, peak, read = (
            spread(seen.mass[:num_kept]),
            spread(seen.peak[:num_kept]),
            spread(seen.read),
        )
        for step in range(num_kept):
            self.history = self.history.observe(mass[step], peak[step], read)
            if self.graph is not None:
                self.graph.observe([self._page_ids[i] for i in heaviest(mass[step])])
        self._is_filled = False
        self.queries = seen.queries[:, num_kept - 1].clone()  # not a view that keeps them all
        self._newest = first + num_kept - 1
