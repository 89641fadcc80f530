"""How many nodes a step asks for follows from what forwards and drafts took, by all rows together."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from oval_adapters.speculative.drafters import MadeDrafter
from oval_adapters.speculative.pace import Costs, Pace, Taken
from oval_core.speculation_config import SpeculationConfig
from oval_spec.acceptance import AcceptanceCounters
from oval_spec.drafter import Draft, DraftRequest, NullDrafter
from oval_spec.token_tree import TokenTree
from oval_spec.turn_off import SpeculationSwitch

TAU = [float(nodes) for nodes in range(1, 65)]
TRIES = 8
SEVEN = SpeculationConfig(max_nodes=7)
FREE = SpeculationConfig()


class Rooted:
    """A drafter that is none: it returns roots."""

    name = "rooted"
    needs_hidden = False

    def reset(self) -> None:
        """Does nothing."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Returns the roots."""
        return [Draft(TokenTree.chain(request.ids[-1:])) for request in requests]


class Noted:
    """Takes note of the sizes of forwards."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Takes note of one."""
        assert seconds > 0
        self.sizes.append(num_tokens)


def pace_of(
    costs: Costs,
    config: SpeculationConfig = FREE,
    rows: int = 1,
    counters: AcceptanceCounters | None = None,
    tau: Sequence[float] | None = TAU,
) -> Pace:
    return Pace(MadeDrafter(Rooted(), tau), config, costs, counters or AcceptanceCounters(), rows)


def known(*drafting: float) -> Costs:
    """Forwards of 1 to 16 tokens take a second, larger ones far longer."""
    costs = Costs(SpeculationSwitch(False), tried=TRIES)
    for size, seconds in ((1, 1.0), (16, 1.0), (32, 100.0), (64, 1000.0)):
        costs.forward.observe(size, seconds)
    costs.drafting.extend(drafting)
    return costs


def test_a_number_that_is_set_is_asked_for() -> None:
    assert pace_of(known(), SEVEN).begin().max_nodes == 7


def test_first_steps_try_sizes_across_calls() -> None:
    costs = Costs(SpeculationSwitch(False))
    sizes = [pace_of(costs).begin().max_nodes for _ in range(TRIES)]
    assert sizes[: TRIES // 2] == sizes[TRIES // 2 :], "each twice"
    assert len(set(sizes)) == TRIES // 2
    assert costs.tried == TRIES


@pytest.mark.parametrize(("rows", "nodes"), [(1, 16), (2, 8), (4, 4), (16, 1)])
def test_a_forward_brings_the_nodes_of_all_rows(rows: int, nodes: int) -> None:
    assert pace_of(known(0.0), rows=rows).begin().max_nodes == nodes


def test_drafting_that_costs_more_than_it_brings_is_left_out() -> None:
    assert pace_of(known(0.1, 0.2)).begin().max_nodes == 16
    assert pace_of(known(100.0, 100.0)).begin().max_nodes == 1


def test_depth_bounds_chains_that_nobody_measured() -> None:
    pace = Pace(
        MadeDrafter(type("Own", (Rooted,), {"name": "self"})()),
        SpeculationConfig(depth=3),
        known(0.0),
        AcceptanceCounters(),
        1,
    )
    assert pace.begin().max_nodes == 4, "the root and three more"


def test_no_drafter_asks_for_the_root_alone() -> None:
    costs = Costs(SpeculationSwitch(False))
    pace = Pace(MadeDrafter(NullDrafter()), FREE, costs, AcceptanceCounters(), 1)
    assert pace.begin().max_nodes == 1
    assert costs.tried == 0


def test_a_step_is_noted_as_it_was() -> None:
    costs, counters = Costs(SpeculationSwitch(False)), AcceptanceCounters()
    noted = Noted()
    costs.forward = noted  # type: ignore[assignment]
    pace = pace_of(costs, SEVEN, rows=3, counters=counters)
    step = pace.begin()
    step.draft([DraftRequest(row=0, ids=[5], hidden=None, max_depth=3, max_nodes=7)])
    pace.end(step, [Taken(nodes=5, accepted=3, emitted=2), Taken(nodes=2, accepted=1, emitted=1)])
    assert noted.sizes == [15], "padded to the widest, rows that have ended too"
    assert len(costs.drafting) == 1
    totals = counters.to_dict()
    assert (totals["drafted"], totals["accepted"], totals["emitted"]) == (5, 2, 3)


def test_plain_steps_of_a_switch_tell_nothing_about_drafting() -> None:
    class Off(SpeculationSwitch):
        def begin_step(self) -> bool:
            super().begin_step()
            return False

    costs = Costs(Off(False))
    pace = pace_of(costs, SEVEN)
    step = pace.begin()
    assert step.max_nodes == 1
    drafts = step.draft([DraftRequest(row=0, ids=[5], hidden=None, max_depth=3, max_nodes=1)])
    assert [len(draft.tree) for draft in drafts] == [1]
    pace.end(step, [Taken(nodes=1, accepted=1, emitted=1)])
    assert not costs.drafting
    assert costs.forward.is_known


def test_a_drafter_with_nothing_to_say_yet_is_asked_again() -> None:
    costs = Costs(SpeculationSwitch(False), tried=TRIES)
    for _ in range(40):  # roots alone: what trees cost is not known, so nothing speaks against them
        costs.forward.observe(1, 1.0)
    assert pace_of(costs).begin().max_nodes > 1


def drafted(*chances: float) -> Draft:
    """A draft whose nodes all follow the root."""
    count = len(chances)
    tree = TokenTree(tuple(range(count + 1)), (-1, *[0] * count))
    return Draft(tree, chances=(1.0, *chances))


def test_trees_that_say_how_likely_they_are_are_cut_to_what_pays() -> None:
    costs = known(0.0)
    pace = pace_of(costs)
    first = pace.begin()
    assert first.max_nodes == 16, "nobody said so yet"
    assert pace.width(first, [drafted(0.5, 0.4)]) == 16
    step = pace.begin()
    assert step.max_nodes == 32
    step.draft([DraftRequest(row=0, ids=[5], hidden=None, max_depth=9, max_nodes=32)])
    assert pace.width(step, [drafted(*[0.5] * 31)]) == 16, "a forward of more costs far more"
    pace.end(step, [Taken(nodes=16, accepted=3, emitted=3)])
    assert pace_of(costs, SEVEN).begin().max_nodes == 7, "a number that is set stays"
    fixed = pace_of(costs, SEVEN)
    assert fixed.width(fixed.begin(), [drafted(*[0.5] * 6)]) == 7
    assert pace.width(pace.begin(), [Draft(TokenTree.chain((1, 2)))]) == 32
    assert pace.begin().max_nodes == 16, "this drafter says nothing"


def test_before_trees_were_measured_they_are_not_held_too_dear() -> None:
    costs = Costs(SpeculationSwitch(False), tried=TRIES, tells=True)
    for _ in range(
        40
    ):  # a new text: n-grams found nothing, so that forwards of one token are all that is known
        costs.forward.observe(1, 1.0)
    pace = pace_of(costs)
    step = pace.begin()
    step.draft([DraftRequest(row=0, ids=[5], hidden=None, max_depth=9, max_nodes=32)])
    assert pace.width(step, [drafted(*[0.6] * 15)]) == 16


def test_a_root_alone_does_not_make_a_drafter_silent() -> None:
    costs = known(0.0)
    costs.tells = True
    pace = pace_of(costs)
    step = pace.begin()
    assert step.is_free
    step.draft([DraftRequest(row=0, ids=[5], hidden=None, max_depth=9, max_nodes=32)])
    root = Draft(TokenTree.chain((5,)))  # a row with one token left, or a plain step
    assert pace.width(step, [root, drafted(*[0.9] * 15)]) == 16
    assert step.promised == pytest.approx(0.9 * 15)
    assert pace.width(pace.begin(), [root]) == 1
    assert pace.begin().is_free


@pytest.mark.parametrize("tells", [True, False])
def test_what_was_measured_in_a_bad_moment_is_measured_again(tells: bool) -> None:
    costs = Costs(SpeculationSwitch(False), tried=TRIES, tells=tells)
    for size, seconds in ((1, 1.0), (4, 9.0), (8, 20.0), (16, 40.0), (32, 90.0)):
        costs.forward.observe(size, seconds)
    sizes = []
    for _ in range(2000):
        pace = pace_of(costs)
        step = pace.begin()
        step.draft([DraftRequest(row=0, ids=[5], hidden=None, max_depth=9, max_nodes=32)])
        width = min(step.max_nodes, 32)
        if tells:
            width = pace.width(step, [drafted(*[0.7] * (width - 1))])
        sizes.append(width)
        costs.forward.observe(width, 1.0)  # now all take the same
    assert sizes[0] == 1
    assert sizes[-100:].count(32) > 90


def test_ngrams_have_a_depth_of_their_own() -> None:
    ngram = MadeDrafter(type("Ngram", (Rooted,), {"name": "ngram"})())
    config = SpeculationConfig(depth=3, ngram_depth=8)
    assert Pace(ngram, config, known(0.0), AcceptanceCounters(), 1).begin().max_nodes == 9


def test_heads_of_another_model_are_doubted_whatever_was_accepted_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counters = AcceptanceCounters()
    counters.record(drafted=9, accepted=5, emitted=6)  # another drafter's
    pace = pace_of(known(), SEVEN, counters=counters)
    for _ in range(60):
        step = pace.begin()
        step.draft([DraftRequest(row=0, ids=[5], hidden=None, max_depth=9, max_nodes=7)])
        pace.end(step, [Taken(nodes=7, accepted=1, emitted=1)])
    told = [r.getMessage() for r in caplog.records if "was accepted" in r.getMessage()]
    assert len(told) == 1
    assert "none of 300 drafted tokens (rooted)" in told[0]
