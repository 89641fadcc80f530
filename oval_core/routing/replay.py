"""Runs routers over recorded passages, in the loop that they will serve in: what is not read is not observed.

Shapes: B passages, T steps, G layer groups, P pages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch

from oval_core.errors import ConfigError
from oval_core.routing.choose import choose
from oval_core.routing.cooccurrence import CooccurrenceGraph, heaviest
from oval_core.routing.recording import Recording
from oval_core.routing.rivals import BySignal
from oval_core.routing.router import FILLS_BY, PARTS, Router
from oval_core.routing.view import EPS, PageHistory, PageView

Loop = Literal["closed", "open"]
"""What a router gets to see of a step: `closed`: the pages that it read; `open`: all of them."""

_TRUTHS = {"oracle_mass": "mass", "oracle_output": "effect"}
"""Signals that no cache can give: what the query will really do."""

_OF_PROMPT = ("h2o", "snapkv", "tova")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayOptions:
    """The rules under which pages are chosen.

    Attributes:
        budget: tokens that a layer reads, those always kept included: a number of them, or a share as a float.
        lead: steps for which a selection stands. A router with lead `layer` chooses at every step all the same.
        num_sink_tokens: first tokens that are always read.
        window_size: last tokens that are always read; a step's own token is, besides.
        loop: whether the router sees only what it read.
    """

    budget: int | float
    lead: int = 1
    num_sink_tokens: int = 16
    window_size: int = 64
    loop: Loop = "closed"

    def __post_init__(self) -> None:
        is_share = isinstance(self.budget, float)
        if not (0.0 < self.budget <= 1.0 if is_share else self.budget >= 1):
            raise ConfigError(
                f"budget: got {self.budget!r}. Allowed: tokens from 1 on, or a share above 0.0 and up to 1.0. Give one."
            )
        for name, low in (("lead", 1), ("num_sink_tokens", 0), ("window_size", 1)):
            if getattr(self, name) < low:
                raise ConfigError(
                    f"{name}: got {getattr(self, name)!r}. Allowed: {low} or more. Give one."
                )
        if self.loop not in ("closed", "open"):
            raise ConfigError(f"loop: got {self.loop!r}. Allowed: closed, open. Name one.")

    def at_choice(self, router: Router, length: int) -> int:
        """Returns the tokens to choose for a sequence of this length: less those that come while the choice stands."""
        tokens = self.budget
        if isinstance(tokens, float):
            tokens = math.ceil(tokens * length)
        return tokens - (self.lead - 1 if router.lead == "step" else 0)


@dataclass(frozen=True, slots=True)
class Replays:
    """What a router did.

    Attributes:
        selections: bool [B, T, G, P] pages that each step reads.
        histories: [B, T, G, P] what the router had seen before each step; None unless asked for.
    """

    selections: torch.Tensor
    histories: PageHistory | None


def kept_pages(recording: Recording, num_sink_tokens: int, window_size: int) -> torch.Tensor:
    """Returns which pages a step reads in any case, bool [T, P]: the first tokens', the last ones', its own."""
    length = recording.context + torch.arange(recording.num_steps)[:, None]
    ends = recording.starts + recording.counts
    in_window = (ends > length - window_size) & (recording.starts <= length)
    return in_window | (recording.starts < num_sink_tokens)


def replay(recording: Recording, router: Router, options: ReplayOptions) -> torch.Tensor:
    """Returns the pages that a router reads at each step, bool [T, G, P]."""
    return replay_many([recording], router, options).selections[0]


def oracle_selections(recording: Recording, options: ReplayOptions) -> torch.Tensor:
    """Returns the pages with the most mass under the same rules, bool [T, G, P]."""
    return replay(recording, BySignal("oracle_mass", "oracle_mass", "layer"), options)


def replay_many(
    recordings: Sequence[Recording],
    router: Router,
    options: ReplayOptions,
    *,
    explore: float = 0.0,
    generator: torch.Generator | None = None,
    with_histories: bool = False,
) -> Replays:
    """Runs a router over several passages at once.

    A closed loop shows the router the mass of the pages that were read, as sparse attention sees it: over them it
    sums to 1.

    Args:
        recordings: passages with the same pages, steps and groups.
        router: what scores the pages.
        options: the rules.
        explore: share of the budget that goes to pages drawn at random.
        generator: where these draws come from; None takes torch's own.
        with_histories: whether to keep what the router had seen before each step.
    Raises:
        ConfigError: the recordings differ in shape, or lack what the router needs.
    """
    _check(recordings, router, explore)
    first = recordings[0]
    committed, exists = first.committed(), first.exists()
    kept = kept_pages(first, options.num_sink_tokens, options.window_size)
    rows = _Rows(recordings, router, options)
    history = rows.prompt_history
    selections, histories = [], []
    selection = torch.zeros_like(rows.mass[:, 0], dtype=torch.bool)
    with torch.no_grad():
        for step in range(first.num_steps):
            if router.lead == "layer" or step % options.lead == 0:
                history = rows.filled(step, history)
                length = first.context + step
                scores = rows.scores(rows.view(step, length, committed[step], history))
                selection = _explored(
                    scores,
                    committed[step],
                    kept[step],
                    options.at_choice(router, length),
                    explore,
                    generator,
                )
            if with_histories:
                histories.append(history)
            read = (selection | kept[step]) & exists[step]
            selections.append(read)
            seen = read if options.loop == "closed" else exists[step].expand(read.shape)
            mass, peak = _as_read(rows.mass[:, step], rows.peak[:, step], seen)
            history = history.observe(mass, peak, seen)
            rows.note(mass)
    stacked = PageHistory(**_stack(histories)) if with_histories else None
    return Replays(torch.stack(selections, dim=1), stacked)


def _check(recordings: Sequence[Recording], router: Router, explore: float) -> None:
    if not recordings:
        raise ConfigError("recordings: got none. Allowed: one or more. Give one.")
    first = recordings[0]
    for other in recordings[1:]:
        same = first.context == other.context and first.mass.shape == other.mass.shape
        if not (same and torch.equal(first.counts, other.counts)):
            raise ConfigError(
                f"recordings: got {other.name!r} with other pages, steps or groups than {first.name!r}. "
                "Allowed: recordings of equal shape. Replay them one by one."
            )
    known = {*PARTS, *_TRUTHS, *_OF_PROMPT, *first.signals}
    missing = sorted(router.needs - known)
    if missing:
        raise ConfigError(
            f"router {router.name}: needs {missing}, which is not recorded. Allowed: {', '.join(sorted(known))}. "
            "Record it, or take another router."
        )
    if not 0.0 <= explore <= 1.0:
        raise ConfigError(f"explore: got {explore!r}. Allowed: 0.0 to 1.0. Give a share.")


class _Rows:
    """The recordings side by side, and what a router may know of them before a step."""

    def __init__(
        self, recordings: Sequence[Recording], router: Router, options: ReplayOptions
    ) -> None:
        self._first, self._router, self._lead = recordings[0], router, options.lead
        # Before a step only the query of the token before it is known, until a layer has its own.
        self._is_late = router.lead == "layer"
        self.mass = torch.stack([r.mass for r in recordings])
        self.peak = torch.stack([r.peak for r in recordings])
        self.prompt_history = PageHistory(**_stack([r.prompt_history for r in recordings], dim=0))
        needs = router.needs
        self._hidden = _stacked(recordings, "hidden") if "hidden" in needs else None
        self._page_hidden = _stacked(recordings, "page_hidden") if "page_hidden" in needs else None
        self._newest = _stacked(recordings, "newest_hidden") if "page_hidden" in needs else None
        self._signals = {
            name: torch.stack([_signal(r, name, self._is_late) for r in recordings])
            for name in needs - PARTS
        }
        self._estimates = None
        if "filled_history" in needs:
            estimates = [_signal(r, FILLS_BY, is_late=False).exp() for r in recordings]
            self._estimates = torch.stack(estimates)
        self._graphs = [_graph_of(r) for r in recordings] if "graph" in needs else []

    def filled(self, step: int, history: PageHistory) -> PageHistory:
        """Returns the history with estimates for what the step before did not read, if the router wants them."""
        if self._estimates is None:
            return history
        return history.filled(self._estimates[:, step])

    def note(self, mass: torch.Tensor) -> None:
        """Takes in what a step saw, [B, G, P], where the router asks for a graph."""
        for graph, own in zip(self._graphs, mass, strict=False):
            graph.observe(heaviest(own))

    def scores(self, view: PageView) -> torch.Tensor:
        """Returns the router's scores [B, G, P]."""
        shape = view.history.last.shape
        if not self._graphs:
            return self._router.score(view).expand(shape)
        ids = range(shape[-1])
        alone = [
            replace(_passage(view, i), graph=graph.adjacency(ids))
            for i, graph in enumerate(self._graphs)
        ]
        return torch.stack([self._router.score(own).expand(shape[1:]) for own in alone])

    def view(
        self, step: int, length: int, committed: torch.Tensor, history: PageHistory
    ) -> PageView:
        """Returns the pages that hold a committed token."""
        pages = int((committed > 0).sum())
        starts, counts = self._first.starts[:pages], committed[:pages]
        page_hidden = None
        if self._page_hidden is not None and self._newest is not None:
            # [B, P, C]; the newest page as far as it is filled
            page_hidden = self._page_hidden[:, :pages].clone()
            page_hidden[:, -1] = self._newest[:, step]
        return PageView(
            starts=starts,
            counts=counts,
            length=length,
            history=history.map(lambda old: old[..., :pages]),
            hidden=None if self._hidden is None else self._hidden[:, step],
            page_hidden=page_hidden,
            signals={
                name: rows[:, step, :, :pages] if name not in _OF_PROMPT else rows[..., :pages]
                for name, rows in self._signals.items()
            },
            lead=self._lead,
        )


def _passage(view: PageView, place: int) -> PageView:
    """Returns one passage of a view of several."""
    return replace(
        view,
        history=view.history.map(lambda old: old[place]),
        hidden=None if view.hidden is None else view.hidden[place],
        page_hidden=None if view.page_hidden is None else view.page_hidden[place],
        signals={name: rows[place] for name, rows in view.signals.items()},
    )


def _graph_of(recording: Recording) -> CooccurrenceGraph:
    """Returns the graph at the end of the prompt."""
    graph = CooccurrenceGraph()
    for mass in recording.prompt_mass:
        graph.observe(heaviest(mass))
    return graph


def _signal(recording: Recording, name: str, is_late: bool) -> torch.Tensor:
    """Returns log mass [T, G, P], row t for step t; or [G, P] of the prompt alone."""
    shape = recording.mass.shape
    if name in recording.signals:
        rows = recording.signals[name]
        return rows[1:] if is_late else rows[:-1]
    if name in _OF_PROMPT:
        value: torch.Tensor = getattr(recording, name)
        return (value.expand(shape[1:]) + EPS).log()
    truth: torch.Tensor = getattr(recording, _TRUTHS[name])
    return (truth + EPS).log()


def _explored(
    scores: torch.Tensor,
    counts: torch.Tensor,
    kept: torch.Tensor,
    budget: int,
    explore: float,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """Returns bool [B, G, P] over all pages, those that do not exist yet included."""
    pages = scores.shape[-1]
    known, kept_known = counts[:pages], kept[:pages]
    spent = budget - math.floor(explore * budget)
    chosen = choose(scores, known, kept_known, spent)
    if explore:
        drawn = torch.rand(scores.shape, generator=generator)
        chosen = choose(drawn, known, chosen, budget)
    absent = chosen.new_zeros(*chosen.shape[:-1], len(counts) - pages)
    return torch.cat((chosen, absent), dim=-1)


def _as_read(
    mass: torch.Tensor, peak: torch.Tensor, read: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns mass and peak as attention over the pages that are read has them."""
    covered = (mass * read).sum(-1, keepdim=True).clamp(min=EPS)
    # The heads of a group cover unlike shares; their mean stands for each of them.
    return mass / covered * read, (peak / covered).clamp(max=1.0) * read


def _stacked(recordings: Sequence[Recording], name: str) -> torch.Tensor:
    return torch.stack([getattr(recording, name) for recording in recordings])


def _stack(histories: Sequence[PageHistory], dim: int = 1) -> Mapping[str, torch.Tensor]:
    names = [f.name for f in fields(PageHistory)]
    return {n: torch.stack([getattr(history, n) for history in histories], dim=dim) for n in names}
