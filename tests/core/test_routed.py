"""`routed` and `guarded` in a cache: they read what they chose, keep what they must, and follow every change of the text."""

from __future__ import annotations

import pytest
import torch
from core.routed_twin import RoutedTwin

from oval_core.config import BACKEND_NAMES
from oval_core.routing.registry import MEASURED_ONLY, ROUTER_NAMES

ROUTERS = sorted(set(ROUTER_NAMES) - set(MEASURED_ONLY))
SMALL = {"token_budget": 16, "num_sink_tokens": 4, "window_size": 4, "layer_groups": 2}


@pytest.mark.parametrize("policy", ["routed", "guarded"])
@pytest.mark.parametrize("router", ROUTERS)
def test_attention_covers_what_was_chosen_and_nothing_else(policy: str, router: str) -> None:
    torch.manual_seed(0)
    twin = RoutedTwin(policy=policy, routing={**SMALL, "router": router, "coverage": 0.7})
    twin.forward([60])
    for _ in range(12):
        twin.forward([1])
    assert max(twin.left_out) > 10
    twin.check()


@pytest.mark.parametrize("backend", sorted(set(BACKEND_NAMES) - {"auto"}))
def test_every_backend_reads_the_same_selection(backend: str) -> None:
    torch.manual_seed(0)
    twin = RoutedTwin(backend=backend, routing={**SMALL, "router": "freekv"})
    twin.forward([60])
    for count in (1, 1, 5, 1, 3):
        twin.forward([count])
    assert max(twin.left_out) > 30


@pytest.mark.parametrize("router", ROUTERS)
def test_a_selection_keeps_to_its_budget(router: str) -> None:
    torch.manual_seed(0)
    twin = RoutedTwin(routing={**SMALL, "router": router})
    twin.forward([60])
    twin.read.clear()
    for _ in range(9):
        twin.forward([1])
    assert max(twin.read) <= 16
    assert min(twin.read) > 16 - 4


def test_rows_of_a_batch_choose_for_themselves() -> None:
    torch.manual_seed(0)
    twin = RoutedTwin(routing={**SMALL, "router": "freekv"})
    twin.forward([60, 21, 40], num_queries=60)
    for counts in ([1, 1, 1], [1, 0, 1], [3, 2, 1], [1, 1, 1]):
        twin.forward(counts, num_queries=max(counts))
    assert max(twin.left_out) > 30
    twin.reorder([2, 2, 0])
    for _ in range(3):
        twin.forward([1, 1, 1])
    twin.check()
