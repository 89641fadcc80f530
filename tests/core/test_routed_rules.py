"""Single rules of `routed` and `guarded` in a cache: what equals what, what leaves no trace, what may not happen."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from core.routed_settings import LITTLE_ROOM, POLICIES, SMALL, left_out, small
from core.routed_world import CPU, FIELDS, RoutedWorld, Shape, close

from oval_core.attention import create_backend
from oval_core.config import BACKEND_NAMES, OvalConfig
from oval_core.paged_cache import PagedCache
from oval_core.policy import FullPolicy
from oval_core.routing.registry import MEASURED_ONLY, ROUTER_NAMES
from oval_core.values import RowRequest

ROUTERS = sorted(set(ROUTER_NAMES) - set(MEASURED_ONLY) - {"random"})
BACKENDS = sorted(set(BACKEND_NAMES) - {"auto"})


def memories_equal(a: RoutedWorld, b: RoutedWorld, rows: int = 1) -> None:
    """History, queries, places and summaries of the rows; page ids may differ."""
    for row in range(rows):
        left, right = a.policy._rows[row], b.policy._rows[row]
        for name in FIELDS:
            close(getattr(left.history, name), getattr(right.history, name), 1e-6)
        assert torch.equal(left.queries, right.queries)
        assert left._newest == right._newest
        assert (left.book is None) == (right.book is None)
        if left.book is None:
            continue
        assert left.book.counts.tolist() == right.book.counts.tolist()
        num = left.book.num_pages
        for name, held in left.book._held.items():
            assert torch.equal(held[:, :, :num], right.book._held[name][:, :, :num])


def plain_forward(cache: PagedCache, world: RoutedWorld, counts: list[int]) -> list[torch.Tensor]:
    """The forward that `world` just made, in another cache, without checks."""
    width = max(counts)
    places = [None if n == width else torch.arange(width - n, width) for n in counts]
    requests = [RowRequest(*r) for r in zip(counts, places, strict=True)]
    cache.begin(requests, width, CPU)
    outputs = []
    for layer in range(len(world.shape.windows)):
        tables = (world.keys, world.values, world.queries)
        k, v, q = (world._columns(t[layer], world.rows, counts, width) for t in tables)
        cache.write(layer, k, v)
        outputs.append(cache.attend(layer, q, world.spec(layer)))
    cache.commit()
    return outputs


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_bfloat16_and_heads_of_other_sizes(backend: str, policy: str) -> None:
    shape = Shape(dtype=torch.bfloat16, head_dim=16, value_dim=8)
    world = RoutedWorld(shape, policy=policy, backend=backend, routing=small(coverage=0.7))
    world.forward([40, 31], queries=40)
    for counts in ([1, 1], [4, 2], [1, 0], [1, 1]):
        world.forward(counts)
    assert left_out(world) > 10
    world.check()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("all_of_it", [{"token_budget": 4096}, {"budget_share": 1.0}])
def test_a_budget_for_everything_equals_full_bit_for_bit(
    policy: str, backend: str, all_of_it: dict[str, Any]
) -> None:
    world = RoutedWorld(policy=policy, backend=backend, routing=small(**all_of_it))
    config = OvalConfig(page_size=4, backend=backend)
    full = PagedCache(config, world.shape.windows, FullPolicy(), create_backend(backend))
    for counts in ([30, 17], [1, 1], [5, 3], [1, 0], [1, 1]):
        world.forward(counts)
        outputs = plain_forward(full, world, counts)
        assert all(map(torch.equal, world.outputs, outputs))
    assert world.policy._counters.selections == 0
    assert world.policy._counters.tokens_read == 0


@pytest.mark.parametrize("router", ["freekv", "quest"])
def test_coverage_of_one_reads_everything(router: str) -> None:
    world = RoutedWorld(policy="guarded", routing=small(router=router, coverage=1.0))
    world.forward([50])
    for count in (1, 3, 1):
        world.forward([count])
    assert world.policy._counters.selections == 3
    assert left_out(world) == 0


@pytest.mark.parametrize("lead", [1, 4, 16])
@pytest.mark.parametrize("router", ["freekv", "quest"])
def test_drafts_and_a_lead_keep_to_the_budget(lead: int, router: str) -> None:
    """The world checks it layer by layer; drafts come while a selection of one token stands."""
    routing = small(lead=lead, token_budget=40, router=router)
    world = RoutedWorld(page_size=3, routing=routing)
    world.forward([70])
    for count in (1, 1, 9, 2, 12, 1, 5):
        length = len(world.rows[0])
        world.forward([count])
        world.truncate([length + (count + 1) // 2])
    assert left_out(world) > 20


@pytest.mark.parametrize(
    "budget", [41, 43]
)  # one that is filled to the last token, one that is not
def test_a_selection_stands_for_its_lead_and_no_longer(budget: int) -> None:
    world = RoutedWorld(routing=small(lead=4, token_budget=budget))
    world.forward([80])
    made = []
    for _ in range(9):
        world.forward([1])
        made.append(world.policy._rows[0].standing)
    stays = [a is b for a, b in pairwise(made)]
    assert stays == [True, True, True, False, True, True, True, False]


@pytest.mark.parametrize("tiers", [None, LITTLE_ROOM])
@pytest.mark.parametrize("budget", [24, 4096])
@pytest.mark.parametrize("router", ["freekv", "ema", "quest"])
def test_drafts_that_are_rejected_leave_no_trace(
    router: str, budget: int, tiers: dict[str, Any] | None
) -> None:
    routing = small(router=router, token_budget=budget)
    worlds = [RoutedWorld(policy="routed", routing=routing, tiers=tiers) for _ in range(2)]
    drafted, plain = worlds
    text = [list(range(100 + 8 * i, 108 + 8 * i)) for i in range(6)]
    for world in worlds:
        for ids in text:
            world.forward([8], ids=[ids])
        world.forward([1], ids=[[500]])
    drafted.forward([3], ids=[[600, 601, 700]])
    drafted.truncate([51])
    plain.forward([2], ids=[[600, 601]])
    for world in worlds:
        world.forward([1], ids=[[800]])
    memories_equal(drafted, plain)
    dense = [world.policy._counters.dense_forwards for world in worlds]
    assert dense[0] == dense[1], "a cut draft must not make the next forward dense"


@pytest.mark.parametrize("policy", POLICIES)
def test_drafts_that_fill_pages_and_are_cut_again(policy: str) -> None:
    """Their summaries must go with them, or the next selection counts pages that are no more."""
    world = RoutedWorld(policy=policy, page_size=2, routing=small(router="estimate", coverage=0.5))
    world.forward([60])
    for _ in range(3):
        length = len(world.rows[0])
        world.forward([11])
        world.truncate([length + 1])
        world.forward([1])
    assert left_out(world) > 20


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tiers", [None, LITTLE_ROOM])
def test_a_forward_that_fails_or_is_dropped_leaves_no_trace(
    policy: str, tiers: dict[str, Any] | None
) -> None:
    routing = small(coverage=0.6, lead=2, token_budget=26)
    worlds = [RoutedWorld(policy=policy, routing=routing, tiers=tiers) for _ in range(2)]
    troubled, calm = worlds
    for step in range(14):
        count = 8 if step < 6 else 1 + step % 3
        for num_layers in (1, 2, 3, 4):
            if step > 2:
                troubled.forward([count], ids=[range(900, 900 + count)], num_layers=num_layers)
        troubled.forward([count], ids=[range(900, 900 + count)], commit=False)
        for world in worlds:
            world.forward([count], ids=[range(20 * step, 20 * step + count)])
        assert all(map(torch.equal, troubled.outputs, calm.outputs))
        assert troubled.reads[-1] == calm.reads[-1]
    memories_equal(troubled, calm)
    assert left_out(calm) > 10


@pytest.mark.parametrize("policy", POLICIES)
def test_an_error_in_the_middle_of_a_layer(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = RoutedWorld(policy=policy, routing=small(coverage=0.6))
    world.forward([50])
    world.forward([1])
    before = world.clone()

    def broken(layer_idx: int) -> list[Any]:
        raise RuntimeError("no more memory")

    monkeypatch.setattr(world.policy, "missed", broken)
    with pytest.raises(RuntimeError, match="no more memory"):
        world.forward([2])
    monkeypatch.undo()
    for one in (world, before):
        one.forward([1], ids=[[7]])
    memories_equal(world, before)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("router", ["freekv", "quest"])
def test_a_row_without_a_token_beside_a_routed_one(policy: str, router: str) -> None:
    world = RoutedWorld(policy=policy, routing=small(router=router, coverage=0.5))
    world.forward([0, 60])
    world.forward([0, 1])
    world.forward([0, 1])
    assert left_out(world) > 20
    world.forward([5, 1])
    world.truncate([0, 60])
    world.forward([0, 1])
    world.forward([3, 1])
    world.check()


def test_a_text_that_is_cut_to_nothing_begins_anew() -> None:
    world = RoutedWorld(routing=SMALL)
    world.forward([40])
    world.forward([1])
    world.truncate([0])
    world.forward([1])
    world.forward([40])
    world.forward([1])
    assert left_out(world) > 10


@pytest.mark.parametrize("policy", POLICIES)
def test_a_text_that_is_cut_far_back_is_read_dense_once(policy: str) -> None:
    """Nobody knows the query of its newest token."""
    world = RoutedWorld(policy=policy, routing=small(coverage=0.5))
    world.forward([60])
    world.forward([130])
    world.truncate([90])  # before the last queries of the long forward
    world.forward([1])
    assert left_out(world) == 0
    world.forward([1])
    assert left_out(world) > 20


@pytest.mark.parametrize("policy", POLICIES)
def test_forks_are_independent(policy: str) -> None:
    world = RoutedWorld(policy=policy, routing=small(coverage=0.7))
    world.forward([42])
    world.forward([1])
    alone = world.clone()
    world.reorder([0, 0, 0])
    for step in range(4):
        ids = [[300 + step], [400 + step], [500 + step]]
        world.forward([1, 1, 1], ids=ids)
        alone.forward([1], ids=[[300 + step]])
        assert all(
            torch.allclose(got[:1], want, atol=1e-5)
            for got, want in zip(world.outputs, alone.outputs, strict=True)
        )
    memories_equal(world, alone)
    assert not torch.equal(world.policy._rows[0].history.last, world.policy._rows[1].history.last)
    world.reorder([2, 0])
    world.forward([1, 1])
    world.check()


def test_uncommitted_tokens_are_always_read() -> None:
    """The world asserts it; here they are many pages, more than the budget."""
    world = RoutedWorld(page_size=1, routing=small(token_budget=9))
    world.forward([60])
    world.forward([16])
    assert left_out(world) == 60 - 4 - 4


def test_the_guard_knows_what_the_router_of_a_layer_has_just_chosen() -> None:
    """Most of the mass is among it, so nothing more is read."""
    routing = small(router="quest", token_budget=56, coverage=0.5)
    world = RoutedWorld(policy="guarded", routing=routing)
    world.forward([80])
    world.reads.clear()
    for _ in range(4):
        world.forward([1])
    assert max(count for _, _, count, _ in world.reads) <= 56


def test_the_audit_counts_what_is_read_besides() -> None:
    """Guarded up to everything: no mass is missed."""
    routing = small(audit_every=1, coverage=1.0)
    world = RoutedWorld(policy="guarded", routing=routing)
    world.forward([50])
    world.forward([1])
    counters = world.policy._counters
    assert counters.audits == 3
    assert counters.audited_mass == 3.0
    assert counters.tokens_repaired > 0
    assert counters.tokens_read == counters.tokens_present == 3 * 51


@pytest.mark.parametrize(("policy", "router"), [("routed", "ema"), ("guarded", "quest")])
def test_the_audit_measures_what_was_missed(policy: str, router: str) -> None:
    routing = small(audit_every=1, coverage=0.8, router=router)
    world = RoutedWorld(policy=policy, routing=routing)
    world.forward([50])
    counters = world.policy._counters
    world.forward([2])
    text, want = world.rows[0], 0.0
    for layer, row, _, _ in world.reads[-3:]:
        pages = world.cache.table.sequences[row].pages
        _, weights = world._attention(layer, text, 2, pages, None, None)
        want += float(weights[..., world.last_read[layer]].sum(-1).mean())
    assert counters.audits == 3
    assert counters.audited_mass == pytest.approx(want, abs=1e-4)
    assert want < 2.999


def test_queries_of_a_long_text_are_let_go() -> None:
    """What is kept of a prompt must not hold all of its queries in memory."""
    world = RoutedWorld(routing=SMALL)
    world.forward([300])
    _, seen = world.policy._rows[0]._waiting
    one = world.shape.num_heads * world.shape.head_dim * 4
    assert seen.queries.untyped_storage().nbytes() == 3 * 64 * one
    world.forward([1])
    assert world.policy._rows[0].queries.untyped_storage().nbytes() == 3 * one


def test_queries_that_wait_for_the_end_of_a_forward_are_few() -> None:
    world = RoutedWorld(routing=SMALL)
    world.forward([300], num_layers=2)
    (kept,) = world.policy._watch._queries[0]
    assert kept.untyped_storage().nbytes() == kept.numel() * kept.element_size()
