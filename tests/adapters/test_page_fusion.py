"""Page fusion moves pages before verifications and changes no token. Shapes: S states, C hidden size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest
import tiny_models
import tiny_routers
import torch

from oval_adapters.attachment import Attachment, attach
from oval_adapters.bench.fusion_chain import ChainRun, Replay, decode_chains, prefill
from oval_adapters.hf_cache import OvalCache
from oval_adapters.speculative.page_fusion import PageFusion
from oval_adapters.speculative.self_draft import watched_cache
from oval_core.config import OvalConfig, RoutingConfig
from oval_core.errors import ConfigError
from oval_core.routing.foresight import foreseen_scores
from oval_core.speculation_config import FUSION_ORDERS
from oval_core.tiers.prepare import prepare
from oval_spec.drafter import Draft, DraftRequest
from oval_spec.token_tree import TokenTree

PROMPT, NEW, DEPTH = 120, 10, 3
TIERS = {"fast_tokens": 64, "sink_tokens": 2, "recent_tokens": 4}
ROUTING = RoutingConfig.from_dict({**tiny_routers.SMALL, "layer_groups": 2})


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny_models.one_thread()


def routing_of(policy: str) -> RoutingConfig | None:
    return None if policy == "full" else ROUTING


@contextlib.contextmanager
def opened(policy: str, tiers: dict[str, int] | None) -> Iterator[tuple[Attachment, OvalCache]]:
    model = tiny_models.build("llama", num_hidden_layers=3)
    config = OvalConfig.from_dict(
        {"page_size": 4, "policy": policy, "tiers": tiers, "routing": routing_of(policy)}
    )
    with attach(model, config) as oval:
        router = tiny_routers.router_for(model)
        with contextlib.closing(watched_cache(oval, ROUTING, router)) as cache:
            yield oval, cache


class Guesses:
    """Drafts of which some are right: the text, with every third token changed."""

    name = "guesses"
    needs_hidden = True

    def __init__(self, truth: Sequence[int]) -> None:
        self._truth = list(truth)

    def reset(self) -> None: ...

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        request = requests[0]
        at = len(request.ids) - PROMPT
        chain = [
            5 if (at + i) % 3 == 0 else token
            for i, token in enumerate(self._truth[at : at + DEPTH])
        ]
        assert request.hidden is not None
        states = torch.stack([request.hidden.roll(i) for i in range(1, DEPTH + 1)])
        return [Draft(TokenTree.chain([request.ids[-1], *chain]), states)]


def decode(
    policy: str, tiers: dict[str, int] | None, order: str | None, drafts: ChainRun | None
) -> tuple[ChainRun, PageFusion | None]:
    ids = tiny_models.prompt(PROMPT)
    with opened(policy, tiers) as (oval, cache):
        first, hidden = prefill(oval.model, cache, ids, 32)
        fusion = None if order is None else PageFusion(cache, order)
        drafter = Guesses([]) if drafts is None else Replay(drafts.steps)
        if drafts is None:  # the truth first, by drafts that are a root alone
            twin = cache.copy()
            drafter = Replay(())
            truth = decode_chains(
                oval.model, twin, [*ids[0].tolist(), first], hidden, drafter, NEW + DEPTH, DEPTH
            )
            drafter = Guesses(truth.tokens)
        run = decode_chains(
            oval.model,
            cache,
            [*ids[0].tolist(), first],
            hidden,
            drafter,
            NEW,
            DEPTH,
            None if fusion is None else lambda draft: fusion.prepare([draft]),
        )
        if tiers is not None:
            cache.paged.tiers.check_integrity()
            cache.close()
            moved = oval.counters.tiers
            assert moved.bytes_prefetched == moved.bytes_used + moved.bytes_wasted
    return run, fusion


@pytest.mark.parametrize(
    ("policy", "orders"),
    [("full", FUSION_ORDERS), ("routed", ("draft", "union")), ("guarded", ("intersection",))],
)
def test_no_order_changes_a_token(policy: str, orders: Sequence[str]) -> None:
    resident, _ = decode(policy, None, None, None)
    kept = [step.accepted for step in resident.steps]
    if policy == "full":  # what a selection gives depends on where forwards end
        assert 0 < sum(kept) < sum(len(step.draft.tree) - 1 for step in resident.steps)
    for order in orders:
        run, fusion = decode(policy, TIERS, order, resident)
        assert run.tokens == resident.tokens, order
        assert [step.accepted for step in run.steps] == kept, order
        assert fusion is not None
        assert (fusion.counters.predicted > 0) == (order != "none")


def test_what_is_wanted_most_is_in_fast_memory_when_the_verification_begins() -> None:
    ids = tiny_models.prompt(PROMPT)
    with opened("full", TIERS) as (oval, cache):
        first, hidden = prefill(oval.model, cache, ids, 32)
        tiers = cache.paged.tiers
        assert tiers.num_away > 10
        fusion = PageFusion(cache, "intersection", budget_tokens=24, most_pages=16)
        before = set(tiers.residency.page_ids)
        states = torch.stack([hidden, hidden.roll(3)])
        fusion.prepare([Draft(TokenTree.chain([first, 7]), states)])
        here = tiers.residency.page_ids
        wanted = sorted(tiers.residency.scores, key=lambda page: -tiers.residency.scores[page])
        assert len(wanted) >= 6
        assert set(wanted[:6]) <= here
        assert fusion.counters.promoted == len(set(wanted) & set(here) - before) > 0
        assert fusion.counters.here + fusion.counters.promoted <= fusion.counters.predicted
        tiers.check_integrity()


def test_states_move_scores_only_through_the_routers_hidden_part() -> None:
    ids = tiny_models.prompt(PROMPT)
    with opened("full", None) as (oval, cache):
        _, hidden = prefill(oval.model, cache, ids, 32)
        policy, sequences = cache.paged.policy, cache.paged.table.sequences
        assert foreseen_scores(policy, sequences, 0).states is None
        found = foreseen_scores(policy, sequences, 0, torch.stack([hidden, -hidden]))
        assert found.states.shape == (2, *found.newest.shape)
        assert len(found.pages) == found.newest.shape[1]
        torch.testing.assert_close(found.states[0], found.newest, atol=1e-5, rtol=1e-5)
        assert float((found.states[1] - found.newest).abs().max()) > 1e-3


def test_looking_ahead_changes_nothing_that_is_read_later() -> None:
    resident, _ = decode("routed", None, None, None)
    ids = tiny_models.prompt(PROMPT)
    with opened("routed", None) as (oval, cache):
        first, hidden = prefill(oval.model, cache, ids, 32)
        policy, sequences = cache.paged.policy, cache.paged.table.sequences

        def look(draft: Draft) -> None:
            assert foreseen_scores(policy, sequences, 0, draft.states) is not None

        run = decode_chains(
            oval.model,
            cache,
            [*ids[0].tolist(), first],
            hidden,
            Replay(resident.steps),
            NEW,
            DEPTH,
            look,
        )
    assert run.tokens == resident.tokens


def test_bad_orders_and_caches_are_refused() -> None:
    with opened("full", TIERS) as (oval, cache):
        with pytest.raises(ConfigError, match="speculation.fusion: got 'first'"):
            PageFusion(cache, "first")
        with (
            contextlib.closing(oval.new_cache()) as plain,
            pytest.raises(ConfigError, match="policy 'full'"),
        ):
            PageFusion(plain, "union")
    with opened("full", None) as (_, cache), pytest.raises(ConfigError, match="tiers: False"):
        PageFusion(cache, "union")


@pytest.mark.parametrize("order", FUSION_ORDERS)
def test_commit_tells_the_tiers_what_the_target_expects_only_where_it_counts(order: str) -> None:
    ids = tiny_models.prompt(PROMPT)
    with opened("routed", TIERS) as (oval, cache):
        first, _ = prefill(oval.model, cache, ids, 32)
        fusion = PageFusion(cache, order)
        policy, asked = cache.paged.policy, []
        whole = policy.foresee
        policy.foresee = lambda sequences: asked.append(1) or whole(sequences)
        prefill(oval.model, cache, torch.tensor([[first]]), 32)
        assert bool(asked) == (order not in ("draft", "recency"))
        fusion.end()
        prefill(oval.model, cache, torch.tensor([[first]]), 32)
        assert asked


def test_sinks_and_newest_pages_stay_whatever_is_wanted() -> None:
    ids = tiny_models.prompt(PROMPT)
    with opened("full", TIERS) as (oval, cache):
        prefill(oval.model, cache, ids, 32)
        tiers, (seq,) = cache.paged.tiers, cache.paged.table.sequences
        near = {seq.pages[0].page_id, seq.pages[-1].page_id} & set(tiers.residency.page_ids)
        away = [page for page in seq.pages if page.page_id not in tiers.residency]
        came = prepare(tiers, away, {page.page_id: 9.0 for page in away}, None, 100)
        assert 0 < came < len(away)
        assert {page.page_id for page in away[:came]} <= set(tiers.residency.page_ids)
        assert near <= set(tiers.residency.page_ids)
        assert near
        tiers.check_integrity()
