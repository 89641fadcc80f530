"""Turns recordings and what a closed loop saw of them into views and targets to train on. Shapes as in `recording.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oval_core.routing.cooccurrence import CooccurrenceGraph, heaviest
from oval_core.routing.loss import mean_ahead
from oval_core.routing.recording import Recording
from oval_core.routing.replay import ReplayOptions, kept_pages, replay_many
from oval_core.routing.router import Router
from oval_core.routing.view import PageHistory, PageView

__all__ = ["Example", "Stretch", "closed_loop", "examples"]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps [start, end) of a recording over which the co-occurrence graph stays the same."""

    start: int
    end: int
    graph: torch.Tensor


@dataclass(frozen=True, slots=True)
class Example:
    """A recording with what a router saw of it.

    Attributes:
        recording: the passage.
        history: [T, G, P] before each step, from the pages that were read.
        stretches: the graph over the steps.
    """

    recording: Recording
    history: PageHistory
    stretches: tuple[Stretch, ...]

    def view(self, stretch: Stretch, lead: int) -> PageView:
        """Returns the pages as a router sees them before each step of a stretch, leading dimension [T']."""
        recording, steps = self.recording, slice(stretch.start, stretch.end)
        return PageView(
            starts=recording.starts,
            counts=recording.counts,
            length=recording.context + torch.arange(stretch.start, stretch.end),
            history=self.history.map(lambda old: old[steps]),
            hidden=recording.hidden[steps],
            page_hidden=recording.page_hidden,
            signals={name: rows[:-1][steps] for name, rows in recording.signals.items()},
            graph=stretch.graph,
            lead=lead,
        )

    def target(self, stretch: Stretch, lead: int, label: str) -> torch.Tensor:
        """Returns the weight of each page over the next `lead` steps, [T', G, P]; fewer where the passage ends."""
        recording = self.recording
        end = min(stretch.end + lead - 1, recording.num_steps)
        mass = mean_ahead(recording.mass[stretch.start : end], lead)
        if label == "mass":
            return mass
        effect = mean_ahead(recording.effect[stretch.start : end], lead)
        if label == "output-error":
            return effect
        return _share(mass) + _share(effect)

    def candidates(self, stretch: Stretch, options: ReplayOptions) -> torch.Tensor:
        """Returns which pages can be chosen at each step, bool [T', 1, P]."""
        recording = self.recording
        kept = kept_pages(recording, options.num_sink_tokens, options.window_size)
        free = (recording.committed() > 0) & ~kept
        return free[stretch.start : stretch.end, None]


def examples(
    recordings: Sequence[Recording],
    router: Router,
    budgets: Sequence[float],
    leads: Sequence[int],
    seed: int,
) -> list[Example]:
    """Runs the closed loop over each recording, budgets and leads in turn, a tenth of each budget at random."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i, recording in enumerate(recordings):
        options = closed_loop(budgets[i % len(budgets)], leads[(i // len(budgets)) % len(leads)])
        replayed = replay_many(
            [recording], router, options, explore=0.1, generator=generator, with_histories=True
        )
        history = replayed.histories
        assert history is not None
        found.append(Example(recording, history.map(lambda h: h[0]), _stretches(recording)))
    return found


def closed_loop(budget: float, lead: int = 1) -> ReplayOptions:
    """Returns the rules of the loop that routers are trained and validated in."""
    return ReplayOptions(budget=budget, lead=lead)


def _stretches(recording: Recording) -> tuple[Stretch, ...]:
    graph, ids = CooccurrenceGraph(), range(recording.mass.shape[-1])
    for mass in recording.prompt_mass:
        graph.observe(heaviest(mass))
    found, start = [], 0
    for step in range(recording.num_steps):
        adjacency = graph.adjacency(ids)
        if graph.observe(heaviest(recording.mass[step])):
            found.append(Stretch(start, step + 1, adjacency))
            start = step + 1
    if start < recording.num_steps:
        found.append(Stretch(start, recording.num_steps, graph.adjacency(ids)))
    return tuple(found)


def _share(weight: torch.Tensor) -> torch.Tensor:
    return weight / weight.sum(-1, keepdim=True).clamp(min=1e-9)
