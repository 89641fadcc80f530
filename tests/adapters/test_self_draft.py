"""Drafts by the target itself: what it reads of its cache decides what it proposes, and nothing of it stays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import tiny_models
import tiny_routers
import torch

from oval_adapters.attachment import Attachment, attach
from oval_adapters.hf_cache import OvalCache
from oval_adapters.speculative.self_draft import SelfDrafter, watch, watched_cache
from oval_core.config import OvalConfig, RoutingConfig
from oval_core.errors import ConfigError
from oval_core.routing.window import WindowPolicy
from oval_core.speculation_config import SpeculationConfig
from oval_spec.drafter import DraftRequest

PROMPT, DEPTH = 90, 4
ROUTING = RoutingConfig.from_dict({**tiny_routers.SMALL, "layer_groups": 2})


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny_models.one_thread()


@contextlib.contextmanager
def opened(watched: bool = True) -> Iterator[tuple[Attachment, OvalCache]]:
    model = tiny_models.build("llama")
    with attach(model, OvalConfig(page_size=4)) as oval:
        router = tiny_routers.router_for(model)
        cache = watched_cache(oval, ROUTING, router) if watched else oval.new_cache()
        with contextlib.closing(cache), torch.no_grad():
            yield oval, cache


def drafter_of(oval: Attachment, policy: str, budget: int) -> SelfDrafter:
    config = SpeculationConfig(drafter="self", depth=DEPTH, self_policy=policy, self_budget=budget)
    return SelfDrafter(oval, config, ROUTING, tiny_routers.router_for(oval.model))


def read(oval: Attachment, cache: OvalCache, ids: torch.Tensor) -> torch.Tensor:
    """Reads [B, T]; returns the greedy token of each row."""
    for piece in ids.split(30, dim=1):
        logits = oval.model(piece, cache=cache, use_cache=True).logits
    return logits[:, -1].argmax(-1)


def requests(texts: Sequence[Sequence[int]], **limits: int) -> list[DraftRequest]:
    most = {"max_depth": 50, "max_nodes": 50, **limits}
    return [DraftRequest(row=row, ids=ids, hidden=None, **most) for row, ids in enumerate(texts)]


def greedy(oval: Attachment, ids: Sequence[int], count: int) -> list[int]:
    text = list(ids)
    for _ in range(count):
        text.append(int(oval.model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(ids) :]


@pytest.mark.parametrize("policy", ["routed", "window"])
def test_with_the_whole_text_it_drafts_what_it_would_say(policy: str) -> None:
    ids = tiny_models.prompt(PROMPT)
    with opened() as (oval, cache):
        text = [*ids[0].tolist(), int(read(oval, cache, ids))]
        drafter = drafter_of(oval, policy, 10_000)
        drafter.bind(cache)
        draft = drafter.draft(requests([text]))[0]
        assert list(draft.tree.tokens) == [text[-1], *greedy(oval, text, DEPTH)]
        assert draft.states is not None
        whole = oval.model.base_model(torch.tensor([[*text, *draft.tree.tokens[1:]]]))
        hidden = whole.last_hidden_state[0, PROMPT : PROMPT + DEPTH]
        torch.testing.assert_close(draft.states, hidden, atol=1e-4, rtol=1e-4)


def snapshot(cache: OvalCache) -> list[torch.Tensor]:
    grids = [cache.grid(layer) for layer in range(cache.num_layers)]
    return [half for grid in grids if grid is not None for half in grid]


@pytest.mark.parametrize("policy", ["routed", "window"])
def test_a_part_of_the_text_gives_other_drafts_and_leaves_no_trace(policy: str) -> None:
    ids = tiny_models.prompt(PROMPT, 2)
    with opened() as (oval, cache):
        first = read(oval, cache, ids).tolist()
        texts = [[*ids[row].tolist(), first[row]] for row in range(2)]
        drafter = drafter_of(oval, policy, 12)
        drafter.bind(cache)
        before, length = snapshot(cache), cache.get_seq_length()
        history = [memory.history.total.clone() for memory in cache.paged.policy._rows]
        drafts = drafter.draft(requests(texts))
        again = drafter.draft(requests(texts))
        assert [draft.tree for draft in drafts] == [draft.tree for draft in again]
        whole = [[text[-1], *greedy(oval, text, DEPTH)] for text in texts]
        assert [list(draft.tree.tokens) for draft in drafts] != whole, "nothing was left out"
        assert cache.get_seq_length() == length
        for old, new in zip(before, snapshot(cache), strict=True):
            torch.testing.assert_close(old, new, atol=0, rtol=0)
        for old, memory in zip(history, cache.paged.policy._rows, strict=True):
            torch.testing.assert_close(old, memory.history.total, atol=0, rtol=0)
        cache.paged.table.check_integrity()
        assert oval.counters.tokens_written == 2 * PROMPT


def test_rows_that_ended_or_want_less_are_not_fed() -> None:
    ids = tiny_models.prompt(PROMPT, 3)
    with opened() as (oval, cache):
        first = read(oval, cache, ids).tolist()
        texts = [[*ids[row].tolist(), first[row]] for row in range(3)]
        drafter = drafter_of(oval, "routed", 10_000)
        drafter.bind(cache)
        whole = [list(draft.tree.tokens) for draft in drafter.draft(requests(texts))]
        some = [
            requests(texts, max_depth=2)[2],
            requests(texts)[0],
        ]
        cut = [list(draft.tree.tokens) for draft in drafter.draft(some)]
        assert cut == [whole[2][:3], whole[0]]
        alone = drafter.draft(requests(texts, max_depth=0))
        assert [(len(draft.tree), draft.states) for draft in alone] == [(1, None)] * 3


def test_routed_drafts_read_other_pages_than_the_window() -> None:
    ids = tiny_models.prompt(PROMPT, 3, seed=4)
    with opened() as (oval, cache):
        first = read(oval, cache, ids).tolist()
        texts = [[*ids[row].tolist(), first[row]] for row in range(3)]
        found = {}
        for policy in ("routed", "window"):
            drafter = drafter_of(oval, policy, 16)
            drafter.bind(cache)
            found[policy] = torch.cat([d.states for d in drafter.draft(requests(texts))])
        assert float((found["routed"] - found["window"]).abs().max()) > 1e-3


def test_bind_has_an_empty_cache_watch_and_refuses_one_that_nobody_watched() -> None:
    ids = tiny_models.prompt(PROMPT)
    with opened(watched=False) as (oval, cache):
        drafter = drafter_of(oval, "routed", 12)
        drafter.bind(cache)
        plain = oval.model(ids, use_cache=False).logits[0, -1]
        read(oval, cache, ids[:, :-1])
        logits = oval.model(ids[:, -1:], cache=cache, use_cache=True).logits[0, -1]
        torch.testing.assert_close(logits, plain, atol=1e-4, rtol=1e-4)
        assert len(drafter.draft(requests([[*ids[0].tolist(), 7]]))[0].tree) == DEPTH + 1
    with opened(watched=False) as (oval, cache):
        read(oval, cache, ids)
        with pytest.raises(ConfigError, match="nobody watched"):
            drafter_of(oval, "routed", 12).bind(cache)
        with pytest.raises(ConfigError, match="nobody watched"):
            watch(cache, oval)
        drafter = drafter_of(oval, "window", 12)
        drafter.bind(cache)
        assert len(drafter.draft(requests([[*ids[0].tolist(), 7]]))[0].tree) == DEPTH + 1


def test_the_window_is_sinks_and_newest_pages_within_the_budget() -> None:
    ids = tiny_models.prompt(PROMPT, 2)
    with opened(watched=False) as (oval, cache):
        read(oval, cache, ids)
        sequences = cache.paged.table.sequences
        windows = [None] * cache.num_layers
        for budget in (10, 21, 40):
            config = replace(ROUTING, token_budget=budget)
            chosen = WindowPolicy(config, windows).select(sequences, [1, 0])
            assert set(chosen.group_of) == {1, 2}  # layer 0 is dense
            pages, nothing = chosen.groups[0]
            assert nothing is None
            assert pages[0].tokens[0] == 0
            newest = [token for page in pages[1:] for token in page.tokens]
            assert newest == list(range(newest[0], PROMPT))
            assert budget - 4 < len(pages[0]) + len(newest) <= budget
        assert (
            not WindowPolicy(replace(ROUTING, token_budget=PROMPT), windows)
            .select(sequences, [1, 1])
            .groups
        )
        assert not WindowPolicy(config, windows).select(sequences, [17, 17]).groups
