"""How many nodes each step asks for, by whom they are drafted, and what the steps took. Knows no model.

The first steps of an attachment try sizes, and so learn what a forward costs here; they emit tokens as all steps do.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from oval_adapters.speculative.drafters import MOST_NODES, MadeDrafter
from oval_core.speculation_config import SpeculationConfig
from oval_spec.acceptance import AcceptanceCounters
from oval_spec.drafter import Draft, Drafter, DraftRequest, NullDrafter
from oval_spec.fusion_trial import AUTO_ORDERS, FusionTrial
from oval_spec.tree_cost import ForwardCost, WidthChooser, choose_num_nodes
from oval_spec.turn_off import SpeculationSwitch

__all__ = ["Costs", "Pace", "Step", "Taken"]

_log = logging.getLogger(__name__)

_TRIED = (16, 8, 32, 4, 16, 8, 32, 4)
"""Nodes of the first steps of an attachment, twice each: a first forward of a size also sets things up for it."""
_AGAIN = 128
"""Steps after which one of these sizes is tried again: what was measured in a bad moment would rule it out for ever."""
_WIDEST = 32
"""Nodes that are asked for where drafts say how likely each is, and are cut to those that pay."""
_LEAST = 4
"""Nodes a row of a forward that tells what trees cost."""
_TREE_TAU = ((1, 1.0), (3, 1.78), (7, 2.02), (15, 2.24), (31, 2.43), (64, 2.55))
"""Tokens a step by nodes that heads of this project bring, where theirs were not measured: (nodes, tokens)."""
_CHAIN_RATE = 0.7
_DOUBTED = 300
"""Drafted tokens without one accepted, after which heads or draft model are doubted."""
_WINDOW = 32
"""Steps over which drafting times are remembered."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What one row took of its tree: `nodes` in it, `accepted` ones and `emitted` tokens; the root counts as a node."""

    nodes: int
    accepted: int
    emitted: int


@dataclass(slots=True)
class Costs:
    """What steps of so many rows took on this machine, kept from call to call.

    Attributes:
        switch: turns speculation off where it is slower.
        forward: seconds of a forward by its tokens, verification included.
        drafting: seconds that drafting took.
        fusion: finds out which order of page fusion costs least.
        widths: cuts trees whose drafter says how likely their nodes are.
        tells: whether the last drafts that proposed something said so.
        tried: sizes that were tried.
        steps: steps since then.
        drafted: tokens that were proposed, to see whether any is ever accepted.
        accepted: of these.
        said: what the switch said last; None if it never switched.
        doubted: whether the user was told that nothing is accepted.
    """

    switch: SpeculationSwitch
    forward: ForwardCost = field(default_factory=ForwardCost)
    drafting: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    fusion: FusionTrial = field(default_factory=lambda: FusionTrial(AUTO_ORDERS))
    widths: WidthChooser = field(default_factory=WidthChooser)
    tells: bool = False
    tried: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    said: str | None = None
    doubted: bool = False


class Step:
    """One step: who drafts, how many nodes, and a clock.

    Attributes:
        max_nodes: nodes that a row's draft may have.
        is_free: whether they may be cut to those that pay.
        promised: accepted nodes that the drafts led to expect; None where they said nothing.
    """

    def __init__(self, drafter: Drafter, max_nodes: int, is_free: bool = False) -> None:
        self.max_nodes, self.is_free = max_nodes, is_free
        self.promised: float | None = None
        self._drafter = drafter
        self._begin = self._drafted = 0.0

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Asks the drafter."""
        self._begin = time.perf_counter()
        drafts = self._drafter.draft(requests)
        self._drafted = time.perf_counter()
        return drafts

    def seconds(self) -> tuple[float, float]:
        """Returns how long drafting took, and what came after it so far."""
        return self._drafted - self._begin, time.perf_counter() - self._drafted


class Pace:
    """Chooses the drafter and the number of nodes of each step of one call."""

    def __init__(
        self,
        made: MadeDrafter,
        config: SpeculationConfig,
        costs: Costs,
        counters: AcceptanceCounters,
        rows: int,
    ) -> None:
        self._drafter, self._known_tau, self._config = made.drafter, made.tau, config
        self._costs, self._counters, self._num_rows = costs, counters, rows
        self._null = NullDrafter()

    @property
    def fusion_trial(self) -> FusionTrial:
        """What finds out which order of page fusion costs least."""
        return self._costs.fusion

    def begin(self) -> Step:
        """Begins a step."""
        if not self._costs.switch.begin_step():
            return Step(self._null, 1)
        costs = self._costs
        chooses = self._config.max_nodes is None and not isinstance(self._drafter, NullDrafter)
        if chooses and costs.tried == len(_TRIED):
            costs.steps += 1
            tries, rest = divmod(costs.steps, _AGAIN)
            if not rest:
                return Step(self._drafter, _TRIED[tries % len(_TRIED)])
            if costs.tells and self._knows_trees():
                return Step(self._drafter, _WIDEST, is_free=True)
        return Step(self._drafter, self._num_nodes())

    def width(self, step: Step, drafts: Sequence[Draft]) -> int:
        """Returns how many nodes of each draft to verify, the best ones."""
        costs = self._costs
        grown = [draft for draft in drafts if len(draft.tree) > 1]  # a root alone says nothing
        if grown:
            costs.tells = all(draft.chances is not None for draft in grown)
        if not costs.tells:
            return step.max_nodes
        told = [(1.0,) if draft.chances is None else draft.chances for draft in drafts]
        width = step.max_nodes
        if step.is_free:
            width = costs.widths.choose(
                told, lambda n: costs.forward.seconds(n * self._num_rows), step.seconds()[0]
            )
        step.promised = sum(sum(own[1:width]) for own in told)
        return width

    def end(self, step: Step, taken: Sequence[Taken]) -> None:
        """Takes note of a step that is through, a `Taken` for each row."""
        costs = self._costs
        drafting, rest = step.seconds()
        width = max(row.nodes for row in taken)  # rows that have ended are padding of a forward
        costs.forward.observe(self._num_rows * width, max(rest, 1e-9))
        if step.max_nodes > 1:
            costs.drafting.append(drafting)
        for row in taken:
            costs.drafted += row.nodes - 1
            costs.accepted += row.accepted - 1
            self._counters.record(
                drafted=row.nodes - 1, accepted=row.accepted - 1, emitted=row.emitted
            )
        if step.promised is not None and step.max_nodes > 1:
            costs.widths.took(step.promised, sum(row.accepted - 1 for row in taken))
        self._doubt()
        said = costs.switch.end_step(sum(row.emitted for row in taken), len(taken))
        if said is not None:
            costs.said = said
            _log.warning("%s", said)

    def _doubt(self) -> None:
        costs = self._costs
        if costs.accepted or costs.drafted < _DOUBTED or costs.doubted:
            return
        costs.doubted = True
        _log.warning(
            "speculation: none of %d drafted tokens (%s) was accepted. Drafts are made for another model, or for other "
            "text; the output is right all the same. Check heads or draft model, or choose drafter 'ngram' or 'none'.",
            costs.drafted,
            self._drafter.name,
        )

    def _knows_trees(self) -> bool:
        """Whether a forward of more than a few nodes a row was measured: before, a tree would be held to cost too much."""
        return self._costs.forward.largest >= _LEAST * self._num_rows

    def _num_nodes(self) -> int:
        if self._config.max_nodes is not None:
            return self._config.max_nodes
        if isinstance(self._drafter, NullDrafter):
            return 1
        costs = self._costs
        if costs.tried < len(_TRIED):
            costs.tried += 1
            return _TRIED[costs.tried - 1]
        if not self._knows_trees():
            return _TRIED[0]  # nothing was proposed so far
        drafting = statistics.median(costs.drafting) if costs.drafting else 0.0
        tau = self._tau()
        return choose_num_nodes(
            tau, lambda n: costs.forward.seconds(n * self._num_rows) + drafting * (n > 1)
        )

    def _tau(self) -> Sequence[float]:
        if self._known_tau is not None:
            return self._known_tau
        config, name = self._config, self._drafter.name
        if name in ("ngram", "draft", "self"):
            depth = config.ngram_depth if name == "ngram" else config.depth
            return [_geometric(_CHAIN_RATE, nodes) for nodes in range(1, depth + 2)]
        return [_between(_TREE_TAU, nodes) for nodes in range(1, MOST_NODES + 1)]


def _geometric(rate: float, count: int) -> float:
    return (1 - rate**count) / (1 - rate)


def _between(points: Sequence[tuple[int, float]], nodes: int) -> float:
    """Returns the value at `nodes`, by a straight line in its logarithm."""
    for (low, less), (high, more) in zip(points, points[1:], strict=False):
        if nodes <= high:
            share = math.log(nodes / low) / math.log(high / low)
            return less + (more - less) * share
    return points[-1][1]
