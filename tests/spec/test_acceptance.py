"""Acceptance figures: totals agree, merging is the same as counting together, every figure is defined."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oval_core.errors import ConfigError
from oval_spec.acceptance import DEFINITIONS, AcceptanceCounters

# drafted, accepted, emitted of each step
STEPS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 10)).map(
        lambda step: (step[0], min(step[:2]), min(step[2], min(step[:2]) + 1))
    ),
    max_size=30,
)


def counted(steps: list[tuple[int, int, int]]) -> AcceptanceCounters:
    counters = AcceptanceCounters()
    for drafted, accepted, emitted in steps:
        counters.record(drafted=drafted, accepted=accepted, emitted=emitted)
    return counters


@settings(deadline=None, derandomize=True, max_examples=50)
@given(STEPS)
def test_totals_are_those_of_the_steps(steps: list[tuple[int, int, int]]) -> None:
    counters = counted(steps)
    kept = [min(accepted, emitted) for _, accepted, emitted in steps]
    assert counters.steps == len(steps)
    assert counters.emitted == sum(emitted for *_, emitted in steps)
    assert counters.drafted == sum(drafted for drafted, *_ in steps)
    assert counters.accepted == sum(kept)
    bonus = sum(emitted > accepted for _, accepted, emitted in steps)
    assert counters.emitted == counters.accepted + bonus
    if steps:
        assert counters.tau == pytest.approx(counters.emitted / len(steps))
        for position, share in enumerate(counters.accepted_by_position, start=1):
            assert share == pytest.approx(sum(k >= position for k in kept) / len(steps))
        assert sum(counters.accepted_by_position) == pytest.approx(sum(kept) / len(steps))


@settings(deadline=None, derandomize=True, max_examples=50)
@given(STEPS, STEPS)
def test_two_processes_count_as_one(
    mine: list[tuple[int, int, int]], theirs: list[tuple[int, int, int]]
) -> None:
    sent = json.loads(json.dumps(counted(theirs).to_dict()))
    counters = counted(mine)
    counters.merge(AcceptanceCounters.from_dict(sent))
    assert counters == counted(mine + theirs)
    assert counters.to_dict() == counted(mine + theirs).to_dict()


def test_figures_of_a_small_case() -> None:
    # Three steps: nothing accepted, two accepted, and one whose text ended within what was accepted.
    counters = counted([(4, 0, 1), (4, 2, 3), (4, 3, 2)])
    assert counters.tau == 2.0
    assert counters.accepted_by_position == pytest.approx([2 / 3, 2 / 3])
    assert counters.draft_acceptance_rate == pytest.approx(4 / 12)
    assert counters.emitted_histogram == [0, 1, 1, 1]


def test_no_step_has_no_figures_but_no_error() -> None:
    figures = AcceptanceCounters().to_dict()
    assert figures["tau"] == 0.0
    assert figures["draft_acceptance_rate"] == 0.0
    assert figures["accepted_by_position"] == []


def test_every_figure_is_defined() -> None:
    assert set(DEFINITIONS) == set(AcceptanceCounters().to_dict()) - {"accepted_counts"}


@pytest.mark.parametrize(
    "damage", [{"drafted": -1}, {"accepted_counts": [1.5]}, {"emitted_histogram": None}]
)
def test_counts_that_are_none_are_refused(damage: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="acceptance counts"):
        AcceptanceCounters.from_dict(counted([(2, 1, 2)]).to_dict() | damage)
