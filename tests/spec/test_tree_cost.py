"""Numbers of nodes from measured cost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oval_spec.tree_cost import ForwardCost, WidthChooser, choose_num_nodes


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
    assert cost.seconds(64) == 95.0, (
        "more tokens do not make it cheaper: both sizes are held to take the mean"
    )
    assert cost.seconds(24) == pytest.approx(95.0)


def test_near_sizes_share_a_bucket() -> None:
    cost = ForwardCost()
    cost.observe(64, 1.0)
    cost.observe(71, 3.0)
    assert cost.seconds(64) == 1.0, "of two the faster"
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


def flat_then_steep(nodes: int) -> float:
    """Seconds: as on a machine that computes 16 nodes in the time of one."""
    return 1.0 if nodes <= 16 else 1.0 + 0.5 * (nodes - 16)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=40),
    st.lists(st.floats(0.1, 3), min_size=41, max_size=41),
    st.floats(0, 1),
)
def test_the_first_width_has_the_best_rate(
    chances: list[float], added: list[float], drafting: float
) -> None:
    own = [1.0, *sorted(chances, reverse=True)]
    cost = [sum(added[: n + 1]) for n in range(len(added))]
    chosen = WidthChooser().choose([own], lambda n: cost[n - 1], drafting)
    rates = [sum(own[:n]) / (cost[n - 1] + drafting) for n in range(1, len(own) + 1)]
    assert rates[chosen - 1] == pytest.approx(max(rates))


def test_widths_settle_where_tokens_a_second_are_most() -> None:
    """Sure and unsure steps alternate; the best rule is one price of a second for both."""
    sure, unsure = [1.0, *[0.9**k for k in range(1, 40)]], [1.0, *[0.2**k for k in range(1, 40)]]

    def cost(nodes: int) -> float:
        return 1 + 0.1 * nodes

    chooser = WidthChooser()
    for _ in range(200):
        widths = [chooser.choose([own], cost, 0.0) for own in (sure, unsure)]

    def rate(pair: tuple[int, int]) -> float:
        tokens = sum(sum(own[:n]) for own, n in zip((sure, unsure), pair, strict=True))
        return tokens / sum(cost(n) for n in pair)

    best = max(((i, j) for i in range(1, 41) for j in range(1, 41)), key=rate)
    assert rate((widths[0], widths[1])) == pytest.approx(rate(best), rel=1e-3)


def test_rows_share_a_width() -> None:
    rows = [[1.0, *[0.5] * 30], [1.0, 0.5]]
    assert WidthChooser().choose(rows, flat_then_steep, 0.0) == 16


def test_one_unlucky_forward_rules_no_size_out() -> None:
    cost = ForwardCost()
    for _ in range(15):
        cost.observe(8, 1.0)
        cost.observe(16, 1.2)
    cost.observe(12, 5.0)
    assert cost.seconds(12) == pytest.approx((5.0 + 15 * 1.2) / 16)
    assert cost.seconds(16) == cost.seconds(12)
    cost.observe(12, 1.1)
    assert cost.seconds(12) == 1.1, "of two the faster"
    assert cost.seconds(16) == 1.2


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0.01, 9)), min_size=1, max_size=40))
def test_larger_forwards_never_seem_cheaper(forwards: list[tuple[int, float]]) -> None:
    cost = ForwardCost()
    for size, seconds in forwards:
        cost.observe(size, seconds)
    told = [cost.seconds(size) for size in range(1, 50)]
    assert all(a <= b + 1e-9 for a, b in zip(told, told[1:], strict=False))
    low, high = min(s for _, s in forwards), max(s for _, s in forwards)
    biggest = max(size for size, _ in forwards)
    assert all(low - 1e-9 <= own <= high + 1e-9 for own in told[:biggest])


def test_a_drafter_that_is_too_sure_is_believed_less() -> None:
    widths = []
    for accepted in (0, 8):
        chooser = WidthChooser()
        for _ in range(100):
            chooser.took(8.0, accepted)
        widths.append(chooser.choose([[1.0, *[0.5] * 20]], lambda n: 1 + 0.2 * (n - 1), 0.0))
    assert widths == [1, 21]


def test_a_drafter_that_was_wrong_for_a_while_is_believed_again() -> None:
    chooser, tree = WidthChooser(), [1.0, *[0.8] * 8]

    def step(rate: float) -> int:
        """Verifies the tree with so much of what it promised being accepted."""
        nodes = chooser.choose([tree], lambda n: 1 + 0.1 * n, 0.0)
        promised = sum(tree[1:nodes])
        chooser.took(promised, round(promised * rate))
        return nodes

    wrong = [step(0.0) for _ in range(60)]
    assert wrong[0] == 9
    assert wrong[-1] == 1, "nothing it says is worth a node"
    right = [step(1.0) for _ in range(400)]
    assert right[-50:] == [9] * 50, "it is asked for little, and what that brings is believed"
