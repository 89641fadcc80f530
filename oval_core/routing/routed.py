"""The policy that reads a part of the text: `routed`, by a router's scores.

Prompts and new turns are read dense; selections begin with the decode steps, and with verification of a few tokens.
Shapes: G layer groups, P pages, Y routed layers, H query heads, N new tokens, D head dim.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence

import torch

from oval_core.config import MAX_PAGE_SIZE, RoutingConfig
from oval_core.errors import ConfigError
from oval_core.kv_pool import LayerStore
from oval_core.metrics import RoutingCounters
from oval_core.page_summary import PageSummaries
from oval_core.pages import Page, SequencePages
from oval_core.repaging import Repaged
from oval_core.routing.choose import choose
from oval_core.routing.chosen import Chosen, pages_of, wanted_later
from oval_core.routing.cooccurrence import CooccurrenceGraph
from oval_core.routing.key_book import KeyBook
from oval_core.routing.key_signals import create_signal, group_log_mass
from oval_core.routing.layer_groups import layer_groups
from oval_core.routing.mass_watch import MassWatch, stayed_of
from oval_core.routing.repair import missing_share_of_pages
from oval_core.routing.router import FILLS_BY, Router
from oval_core.routing.router_needs import router_signals
from oval_core.routing.row_memory import RowMemory, Standing
from oval_core.routing.row_view import view_row
from oval_core.routing.second_look import look_again
from oval_core.routing.token_watch import TokenWatch
from oval_core.routing.view import PageHistory, PageView
from oval_core.values import LayerSpec, PageSelection, RowPagesChosen, RowPlan, StepPlan

_UNKNOWN = -30.0
"""Log mass of a page that has no summary: it is an open one, at the end, and read anyway."""


class RoutedPolicy:
    """Reads sinks, the newest tokens, and the pages that a router scores highest, within a budget of tokens."""

    name = "routed"

    def __init__(
        self,
        config: RoutingConfig,
        windows: Sequence[int | None],
        router: Router,
        counters: RoutingCounters,
        most_tokens: int = MAX_PAGE_SIZE,
    ) -> None:
        """Makes the policy of one cache.

        Args:
            config: settings.
            windows: sliding window of each decoder layer; layers that have one are not routed.
            router: scores pages.
            counters: totals to add to.
            most_tokens: of a page.
        Raises:
            ConfigError: no layer is left to be routed, or the router needs what no cache can tell it.
        """
        self.group_of = layer_groups(config, windows)
        self._layers = list(self.group_of)
        self._config, self._router, self._counters = config, router, counters
        self._asked = router_signals(router)
        self._signals = self._signal_names()
        self._rows: list[RowMemory] = []
        self._chosen: list[Chosen | None] = []
        self._watch = MassWatch(self.group_of)
        self._tokens: TokenWatch | None = None
        self._spec: LayerSpec | None = None  # of the layer that ran last
        self._forwards = 0
        self._reads_whole = False
        self._most_tokens = most_tokens

    @property
    def tracks_hidden(self) -> bool:
        """Whether the router reads hidden states."""
        return bool({"hidden", "page_hidden"} & self._router.needs)

    @property
    def num_groups(self) -> int:
        """Selections a forward."""
        return 1 + max(self.group_of.values())

    def bind(self, summaries: PageSummaries, tokens: TokenWatch | None = None) -> None:
        """Is given the summaries of the cache's pages, and who is to be told what tokens get."""
        # they reach the storages, which hold this policy: a cycle would keep K and V of a cache that nobody holds
        self._held_summaries, self._tokens = weakref.ref(summaries), tokens

    def select(self, sequences: Sequence[SequencePages], num_new: Sequence[int]) -> PageSelection:
        """Returns the pages to read; everything where a row brings many tokens, or nothing is known of it yet."""
        self._watch = MassWatch(self.group_of)
        self._forwards += 1
        while len(self._rows) < len(sequences):
            self._rows.append(self._new_row())
        self._chosen = [
            self._choose(row, seq, num_new[row]) if num_new[row] else None
            for row, seq in enumerate(sequences)
        ]
        self._count(sequences, num_new)
        return self._selection(self._chosen)

    def foresee(self, sequences: Sequence[SequencePages]) -> PageSelection | None:
        """Returns what one more token a row would read; None where that is everything."""
        rows, scored = self._rows, self._counters.summary_tokens
        self._rows = [memory.ahead() for memory in rows]
        try:
            chosen = [self._choose(row, seq, 1) for row, seq in enumerate(sequences)]
            return self._selection(chosen) if any(chosen) else None
        finally:  # what is scored again when the forward begins counts then
            self._rows, self._counters.summary_tokens = rows, scored

    def read_whole(self) -> None:
        """Lets the next forward read everything, however short it is: a piece of a prompt or of a long turn."""
        self._reads_whole = True

    def watches(self, layer_idx: int) -> bool:
        """Whether a layer is routed."""
        return layer_idx in self.group_of

    def saw(
        self,
        layer_idx: int,
        row: int,
        query: torch.Tensor,
        store: LayerStore,
        plan: RowPlan,
        spec: LayerSpec,
        bias: torch.Tensor | None,
        page_lse: torch.Tensor | None,
    ) -> None:
        """Notes what pages got."""
        self._spec = spec
        self._watch.saw(layer_idx, row, query, store, plan, spec, bias, page_lse)
        if self._tokens is not None:
            self._tokens.saw(layer_idx, row, query, store, plan, spec, bias, page_lse)

    def missed(self, layer_idx: int) -> Sequence[Sequence[Page]]:
        """Returns what each row must read besides, now that the true query of the layer is known."""
        found: list[Sequence[Page]] = []
        for row, chosen in enumerate(self._chosen):
            if chosen is None:
                found.append(())
                continue
            read = chosen.mask[self.group_of[layer_idx]]
            more = self._more(layer_idx, row, chosen, read)
            pages = [] if more is None else pages_of(chosen.pages, more)
            self._counters.tokens_repaired += sum(len(page) for page in pages)
            self._counters.tokens_read += sum(len(page) for page in pages)
            self._audit(layer_idx, row, chosen, read, pages)
            found.append(pages)
        return found

    def commit(
        self,
        sequences: Sequence[SequencePages],
        plan: StepPlan,
        hidden_states: torch.Tensor | None,  # noqa: ARG002 - the pool keeps them
        accepted: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Takes what was seen, and makes the summaries of the pages that are complete now."""
        for row in self._watch.rows:
            seq, own = sequences[row], plan.rows[row]
            stayed = None if accepted is None else stayed_of(seq, own.num_new, accepted[row])
            seen = self._watch.row(row, stayed)
            if seen.queries.shape[1]:
                self._rows[row].note(seen, seq.num_committed)
        for row, seq in enumerate(sequences):
            memory = self._rows[row]
            if self._signals and memory.book is None and self._spec is not None:
                names, most = sorted(self._signals), self._most_tokens
                signals = [create_signal(name, self._spec.scaling, most) for name in names]
                memory.book = KeyBook(self._layers, signals)
            if memory.book is not None:
                memory.book.refresh(seq, self._summaries.read_keys)
        self._end()

    def repaged(self, row: int, parts: Sequence[Repaged], num_known: int) -> None:
        """Carries what is known of a row's pages over to those that took their tokens over."""
        self._rows[row].repage(parts, num_known)

    def abort(self) -> None:
        """Forgets what was seen since `select`."""
        self._end()

    def reorder(self, rows: Sequence[int]) -> None:
        """Makes row i what row rows[i] was."""
        old = self._rows
        taken: set[int] = set()
        self._rows = []
        for row in rows:
            self._rows.append(old[row].clone() if row in taken else old[row])
            taken.add(row)

    def reset(self) -> None:
        """Forgets every row."""
        self._rows = []
        self._end()

    def clone(self) -> RoutedPolicy:
        """Returns an independent copy, for a copy of the cache."""
        twin = copy.copy(self)
        twin._rows = [memory.clone() for memory in self._rows]
        twin._end()
        return twin

    def take_over(self, other: RoutedPolicy) -> None:
        """Goes on where another policy stands, with its memory of each row: one prompt then serves many routers.

        The other must have kept the signals that this router needs, for the same groups of layers.
        """
        assert self.group_of == other.group_of, "other groups of layers"
        assert self._signals <= other._signals, "signals that nobody kept"
        assert other.tracks_hidden or not self.tracks_hidden, "hidden states that nobody kept"
        self._rows = [memory.clone() for memory in other._rows]
        self._held_summaries, self._spec = other._held_summaries, other._spec

    def _more(
        self, layer: int, row: int, chosen: Chosen, read: torch.Tensor
    ) -> torch.Tensor | None:
        """Returns further pages for a layer, bool [P]; None for none."""
        if self._router.lead == "step" and not self._looks_again:
            return None
        memory = self._rows[row]
        assert memory.book is not None, "a look at a layer's query needs summaries"
        place = self._layers.index(layer)
        counts = torch.tensor([len(page) for page in chosen.pages])
        if self._looks_again:
            self._counters.summary_tokens += memory.book.cost(FILLS_BY, 1)
            query = self._watch.query(row)
            return look_again(memory.book, query, place, read, counts, chosen.budget)
        signals = self._log_masses(memory.book, self._watch.query(row)[None], len(read), place)
        known = memory.history.of_group(self.group_of[layer], len(read))
        best = {name: log.amax(0) for name, log in signals.items()}
        scores = self._router.score(self._view(row, chosen.pages, best, known))
        return choose(scores, counts, read, chosen.budget)[0] & ~read

    @property
    def _looks_again(self) -> bool:
        return self._router.lead == "step" and self._config.second_look > 0

    def _choose(self, row: int, seq: SequencePages, num_new: int) -> Chosen | None:
        config, memory = self._config, self._rows[row]
        pages = memory.settle(seq)
        if memory.book is not None:  # pages may have been cut since it was made
            memory.book.refresh(seq, self._summaries.read_keys)
        budget = config.budget(seq.length)
        is_long = num_new > config.max_queries or self._reads_whole
        if is_long or seq.length <= budget or not self._is_known(memory):
            return None
        all_pages = seq.pages
        recent = seq.num_committed - config.window_size
        kept = torch.tensor(
            [p.tokens[0] < config.num_sink_tokens or p.tokens[-1] >= recent for p in all_pages]
        )
        counts = torch.tensor([len(page) for page in all_pages])
        standing = memory.standing
        if standing is not None and seq.num_committed < standing.until:
            held = [[page.page_id in own for page in all_pages] for own in standing.page_ids]
            mask = torch.tensor(held) | kept
            # drafts may have taken more than was left for
            if int((mask * counts).sum(-1).max()) <= budget:
                return Chosen(all_pages, mask, budget)
        if self._router.lead == "layer":
            return Chosen(all_pages, kept.expand(self.num_groups, -1), budget)
        scores = self._scores(row, pages)
        padded = scores.new_full((self.num_groups, len(all_pages)), float("-inf"))
        padded[:, : len(pages)] = scores
        mask = choose(padded, counts, kept, self._ahead(budget, int(counts[kept].sum())))
        if config.lead > 1:
            ids = [frozenset(p.page_id for p in pages_of(all_pages, own)) for own in mask]
            memory.standing = Standing(tuple(ids), seq.num_committed + config.lead)
        return Chosen(all_pages, mask, budget)

    def _ahead(self, budget: int, always: int) -> int:
        """Returns the tokens that a router spends ahead: not those of drafts to come, nor of the second look."""
        later = max(0, budget - always) * self._config.second_look if self._looks_again else 0.0
        return budget - (self._config.lead - 1) - int(later)

    def _scores(self, row: int, pages: Sequence[Page]) -> torch.Tensor:
        """Returns scores [G, P] of the pages of committed tokens."""
        memory = self._rows[row]
        signals: dict[str, torch.Tensor] = {}
        if self._asked:
            assert memory.book is not None
            assert memory.queries is not None
            signals = self._log_masses(memory.book, memory.queries, len(pages), None)
        if "filled_history" in self._router.needs:
            memory.fill(signals[FILLS_BY].exp())
        with torch.no_grad():
            view = self._view(row, pages, signals, memory.history)
            scores = self._router.score(view).float().cpu()
        if tuple(scores.shape) != (self.num_groups, len(pages)):
            raise ConfigError(
                f"routing.router: {self._router.name!r} gave scores {list(scores.shape)}. Allowed: {self.num_groups} "
                f"selections x {len(pages)} pages, as its view says. Mend the router."
            )
        return scores

    def _view(
        self,
        row: int,
        pages: Sequence[Page],
        signals: Mapping[str, torch.Tensor],
        history: PageHistory,
    ) -> PageView:
        memory, lead = self._rows[row], self._config.lead
        return view_row(self._router, memory, self._summaries, row, pages, signals, history, lead)

    def _log_masses(
        self, book: KeyBook, queries: torch.Tensor, num_pages: int, layer: int | None
    ) -> dict[str, torch.Tensor]:
        """Returns signals by name, [G, P], or of one layer [W, 1, P] for queries [1, W, H, D]."""
        found = {}
        groups = [self.group_of[i] for i in self._layers] if layer is None else [0]
        for name in self._asked:
            asked = queries if layer is None else queries[0]
            scores = book.scores(name, asked, layer)
            scores = scores if layer is None else scores[:, None]
            is_mean = book.signal(name).is_mean
            masses = group_log_mass(scores.cpu(), book.counts, groups, is_mean=is_mean)
            full = masses.new_full((*masses.shape[:-1], num_pages), _UNKNOWN)
            full[..., : masses.shape[-1]] = masses
            found[name] = full
            self._counters.summary_tokens += book.cost(name, len(groups))
        return found

    def _is_known(self, memory: RowMemory) -> bool:
        if memory.history.last.shape[-1] == 0 or memory.queries is None:
            return False
        return not self._signals or (memory.book is not None and memory.book.num_pages > 0)

    def _signal_names(self) -> set[str]:
        """Returns the signals whose summaries are kept."""
        return self._asked | {FILLS_BY} if self._looks_again else self._asked

    def _new_row(self) -> RowMemory:
        graph = CooccurrenceGraph() if "graph" in self._router.needs else None
        return RowMemory(self.num_groups, None, graph)

    def _selection(self, chosen: Sequence[Chosen | None]) -> PageSelection:
        if not any(chosen):
            return PageSelection(is_watched=True)
        groups: list[tuple[RowPagesChosen, ...]] = []
        for group in range(self.num_groups):
            groups.append(
                tuple(
                    None if c is None else tuple(pages_of(c.pages, c.mask[group])) for c in chosen
                )
            )
        scores = wanted_later(chosen, [row.history_mass for row in self._rows[: len(chosen)]])
        return PageSelection(tuple(groups), self.group_of, scores, is_watched=True)

    def _count(self, sequences: Sequence[SequencePages], num_new: Sequence[int]) -> None:
        for row, chosen in enumerate(self._chosen):
            if num_new[row] == 0:
                continue
            if chosen is None:
                self._counters.dense_forwards += 1
                continue
            counts = torch.tensor([len(page) for page in chosen.pages])
            layers = torch.tensor([self._layers_in(g) for g in range(self.num_groups)])
            self._counters.selections += 1
            self._counters.tokens_read += int(((chosen.mask * counts).sum(-1) * layers).sum())
            self._counters.tokens_present += sequences[row].length * len(self._layers)

    def _layers_in(self, group: int) -> int:
        return sum(own == group for own in self.group_of.values())

    def _audit(
        self, layer: int, row: int, chosen: Chosen, read: torch.Tensor, more: Sequence[Page]
    ) -> None:
        """Measures what share of a layer's true attention mass the pages that it reads hold, `more` among them."""
        every = self._config.audit_every
        if every is None or self._forwards % every:
            return
        assert self._spec is not None, "the layer was seen"
        also = {page.page_id for page in more}
        unread = [page for page in pages_of(chosen.pages, ~read) if page.page_id not in also]
        lse, query = self._watch.seen(row).lse, self._watch.query(row)
        keys = self._summaries.read_keys
        share = missing_share_of_pages(lse, query, unread, more, layer, keys, self._spec)
        self._counters.audits += 1
        self._counters.audited_mass += 1.0 - share

    @property
    def _summaries(self) -> PageSummaries:
        summaries = self._held_summaries()
        assert summaries is not None, "the cache has ended"
        return summaries

    def _end(self) -> None:
        self._chosen, self._reads_whole = [], False
        self._watch = MassWatch(self.group_of)
