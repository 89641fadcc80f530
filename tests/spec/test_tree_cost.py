"""Numbers of nodes from measured cost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oval_spec.tree_cost import ForwardCost, choose_num_nodes


def test_a_forward_costs_the_median_of_its_size() -> None:
    cost = ForwardCost()
    assert not cost.is_known
    for seconds in (1.0, 1.1, 50.0, 0.9, 1.0):
        cost.observe(4, seconds)
    assert cost.is_known
    assert cost.seconds(4) == 1.0
    for _ in range(16):
        cost.observe(4, 3.0)
    assert cost.seconds(4) == 3.0, "old forwards are forgotten"


def test_between_sizes_runs_a_line() -> None:
    cost = ForwardCost()
    cost.observe(1, 10.0)
    assert cost.seconds(3) == 30.0, "one size alone counts in proportion"
    cost.observe(8, 17.0)
    assert cost.seconds(4) == pytest.approx(13.0)
    assert cost.seconds(16) == pytest.approx(25.0)
    cost.observe(16, 100.0)
    assert cost.seconds(32) == pytest.approx(200.0), "not steeper than in proportion"
    cost.observe(32, 90.0)
    assert cost.seconds(64) == 90.0, "more tokens do not make it cheaper"
    assert cost.seconds(24) == pytest.approx(95.0)


def test_near_sizes_share_a_bucket() -> None:
    cost = ForwardCost()
    cost.observe(64, 1.0)
    cost.observe(71, 3.0)
    assert cost.seconds(64) == 2.0
    cost.observe(72, 9.0)
    assert cost.seconds(72) == 9.0


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.lists(st.floats(0.1, 1), min_size=1, max_size=20), st.floats(0, 2), st.floats(0.1, 2))
def test_no_other_number_is_faster(gains: list[float], slope: float, base: float) -> None:
    tau = [1 + sum(gains[:i]) for i in range(len(gains) + 1)]

    def seconds(nodes: int) -> float:
        return base + slope * nodes

    nodes = choose_num_nodes(tau, seconds)
    speeds = [t / seconds(i + 1) for i, t in enumerate(tau)]
    assert speeds[nodes - 1] == max(speeds)
    assert max(speeds) not in speeds[: nodes - 1], "of equals the smallest"


def test_cheap_nodes_are_taken_and_dear_ones_left() -> None:
    tau = [1.0, 1.5, 1.8, 1.9]
    assert choose_num_nodes(tau, lambda nodes: 1.0) == 4
    assert choose_num_nodes(tau, float) == 1
    assert choose_num_nodes(tau, lambda nodes: 1 + 0.2 * nodes) == 3
