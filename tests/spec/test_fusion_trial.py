"""Orders of page fusion are tried in turn, and the cheapest stays."""

from __future__ import annotations

import pytest

from oval_spec.fusion_trial import REST, SPAN, TURNS, FusionTrial

ORDERS = ("none", "intersection", "union")
LONG = SPAN * TURNS * len(ORDERS)


def run(trial: FusionTrial, steps: int, cost: dict[str, float]) -> list[str]:
    seen = []
    for _ in range(steps):
        seen.append(trial.order)
        trial.end_step(cost[trial.order])
    return seen


@pytest.mark.parametrize("cheapest", ORDERS)
def test_the_cheapest_order_stays(cheapest: str) -> None:
    trial = FusionTrial(ORDERS)
    cost = {order: 0.5 if order == cheapest else 1.0 for order in ORDERS}
    tried = run(trial, LONG, cost)
    assert tried == [order for order in ORDERS * TURNS for _ in range(SPAN)]
    assert trial.settled == cheapest
    assert run(trial, REST, cost) == [cheapest] * REST


def test_all_are_tried_again_and_another_can_win() -> None:
    trial = FusionTrial(ORDERS)
    run(trial, LONG + REST, {"none": 1.0, "intersection": 2.0, "union": 3.0})
    assert trial.settled == "none"
    run(trial, LONG, {"none": 3.0, "intersection": 2.0, "union": 1.0})
    assert trial.settled == trial.order == "union"


def test_the_first_of_equals_wins() -> None:
    trial = FusionTrial(ORDERS)
    run(trial, LONG, dict.fromkeys(ORDERS, 0.0))
    assert trial.settled == ORDERS[0]


def test_what_the_order_before_left_does_not_count() -> None:
    trial = FusionTrial(("none", "union"))
    before, place = "", 0
    for _ in range(SPAN * TURNS * 2):
        place = place + 1 if trial.order == before else 0
        before = trial.order
        trial.end_step(
            100.0 if place == 0 and before == "union" else {"none": 2.0, "union": 1.0}[before]
        )
    assert trial.settled == "union"


def test_one_hiccup_decides_nothing() -> None:
    trial = FusionTrial(("none", "union"))
    for step in range(SPAN * TURNS * 2):
        trial.end_step(50.0 if step == SPAN + 1 else {"none": 2.0, "union": 1.0}[trial.order])
    assert trial.settled == "union"


def test_one_order_is_always_that() -> None:
    assert set(run(FusionTrial(("union",)), 2 * REST, {"union": 1.0})) == {"union"}
