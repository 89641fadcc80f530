"""Pages of a running cache under each sizing: attention is that over what was read, and what is remembered follows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from core.cut_twin import ROUTING, TIERS, CutTwin
from core.repaged_table import filled, partition
from core.routed_twin import RoutedTwin
from core.routed_world import RoutedWorld, Shape, SlowHistory, close
from hypothesis import given, settings
from hypothesis import strategies as st

from oval_core.config import OvalConfig
from oval_core.errors import ConfigError
from oval_core.routing.carried import Carrier
from oval_core.routing.page_cutter import create_cutter, open_page_size
from oval_core.routing.sizing import Evidence, create_sizing
from oval_core.routing.view import PageHistory

SIZINGS = ("attention_entropy", "dynamic", "key_similarity")


@pytest.mark.parametrize("policy", ["routed", "guarded"])
@pytest.mark.parametrize("has_tiers", [False, True])
@pytest.mark.parametrize("sizing", SIZINGS)
def test_attention_and_integrity_hold_in_any_order_of_changes(
    sizing: str, has_tiers: bool, policy: str
) -> None:
    torch.manual_seed(1)
    rng = random.Random(3)
    rows = 2
    twin = CutTwin(sizing, policy=policy, **({"tiers": TIERS} if has_tiers else {}))
    twin.forward([100, 60][:rows], num_queries=100)
    twin.check_all()
    sealed_early = 0
    for step in range(30):
        before = [seq.tail for seq in twin.cache.table.sequences]
        change = rng.choice(["decode"] * 6 + ["draft", "turn", "fork", "padded", "clone", "abort"])
        if change == "draft":
            twin.forward([4] * rows)
            kept = [length - rng.randint(0, 4) for length in twin.lengths]
            twin.truncate(kept)
        elif change == "turn" and max(twin.lengths) < 250:
            twin.forward([rng.randint(7, 40)] * rows)
        elif change == "fork":
            twin.reorder([rng.randrange(rows) for _ in range(rows)])
        elif change == "padded":
            twin.forward([3, 1][:rows], num_queries=3)
        elif change == "clone":
            twin.cache = twin.cache.clone()
        elif change == "abort":
            twin.forward([9] * rows, commit=False)
        else:
            twin.forward([1] * rows)
            sealed_early += sum(p is not None and p.sealed and len(p) < 32 for p in before)
        if step % 20 == 10:
            twin.truncate([length - rng.randint(1, 30) for length in twin.lengths])
        twin.check_all()
    assert sealed_early > 0
    assert max(twin.left_out) > 10
    if twin.cache.tiers is not None:
        assert twin.cache.tiers.num_away > 0
    twin.reset()
    twin.forward([80])
    twin.check_all()
    twin.cache.close()


@pytest.mark.parametrize("sizing", ["dynamic", "key_similarity"])
def test_a_prompt_is_cut_as_the_method_says(sizing: str) -> None:
    torch.manual_seed(0)
    twin = CutTwin(sizing)
    twin.forward([90, 40], num_queries=90)
    for row in range(2):
        assert twin.sizes(row) == twin.sizing.sizes(twin.evidence(row, 0))
    assert twin.sizes(0) != [8] * 11 + [2]
    twin.forward([1, 1])
    first = [seq.pages[-1].tokens[0] for seq in twin.cache.table.sequences]
    open_ = [seq.tail is not None for seq in twin.cache.table.sequences]
    before = [seq.length for seq in twin.cache.table.sequences]
    twin.forward([30, 30])  # a new turn: the open page is cut with it
    for row in range(2):
        start = first[row] if open_[row] else before[row]
        done = twin.sizing.sizes(twin.evidence(row, start))
        assert twin.sizes(row)[-len(done) :] == done
        assert sum(twin.sizes(row)) == twin.lengths[row]


@pytest.mark.parametrize("sizing", ["dynamic", "key_similarity"])
def test_an_open_page_ends_when_the_method_says(sizing: str) -> None:
    torch.manual_seed(0)
    twin = CutTwin(sizing)
    twin.forward([90])
    gauge, ended = twin.sizing.gauge(twin.evidence(0, 0)), 0
    for _ in range(60):
        twin.forward([1])
        page = twin.cache.table.sequences[0].pages[-1]
        done = twin.sizing.is_tail_done(twin.evidence(0, page.tokens[0]), gauge)
        assert page.sealed == (done or len(page) == page.capacity)
        ended += page.sealed
    assert 3 <= ended <= 25
    twin.check_all()


def test_a_short_turn_does_not_say_what_is_usual_in_a_long_text() -> None:
    torch.manual_seed(0)
    twin = CutTwin("dynamic")
    twin.forward([40])
    gauge = twin.cutter._rows[0].gauge
    twin.forward([7])
    assert twin.cutter._rows[0].gauge == gauge
    twin.forward([300])
    gauge = twin.cutter._rows[0].gauge
    twin.forward([200])
    assert twin.cutter._rows[0].gauge == gauge
    twin.forward([260])
    assert twin.cutter._rows[0].gauge != gauge
    twin.reorder([0, 0])
    assert twin.cutter._rows[0] is twin.cutter._rows[1]


def test_a_text_without_a_long_forward_has_pages_of_the_mean_size() -> None:
    twin = CutTwin("dynamic")
    for count in (5, 1, 1, 1, 1, 3, 2, 2, 4, 4, 4, 4):
        twin.forward([count])
    assert twin.sizes() == [8] * 4


class CutWorld(RoutedWorld):
    """One row; keeps the weights of the layers that are looked at, and asks for no history by page."""

    def _check_start(self, counts: Sequence[int]) -> None:
        self.histories = [SlowHistory(self.policy.num_groups) for _ in counts]
        self.weights: list[torch.Tensor] = []

    def _attention(self, layer: int, *facts: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, weights = super()._attention(layer, *facts)
        assert self.cache._cutter is not None
        if layer in self.cache._cutter._layers:
            self.weights.append(weights[:, -64:])
        return out, weights


@pytest.mark.parametrize("has_tiers", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_get_what_attention_gave_them(has_tiers: bool, dtype: torch.dtype) -> None:
    routing = {**ROUTING, "sizing": "attention_entropy", "dense_layers": (0,)}
    tiers = {"tiers": TIERS} if has_tiers else {}
    world = CutWorld(Shape(dtype=dtype), page_size=8, routing=routing, **tiers)
    cutter = world.cache._cutter
    assert cutter is not None
    want, seen = torch.zeros(600, dtype=torch.float64), torch.zeros(600)
    for count in (100, 1, 1, 4, 30, 1, 100, 1, 90, 100, 1, 1):
        seq = world.cache.table.sequences[0] if world.rows else None
        start = 0 if seq is None else seq.length
        start = seq.tail.tokens[0] if seq is not None and seq.tail is not None else start
        world.forward([count])
        length = len(world.rows[0])
        got = torch.stack(world.weights)  # [Y, H, W, L]
        assert len(got) == len(cutter._layers) == 1
        want[start:length] += got.mean((0, 1)).sum(0)[start:]
        last = torch.arange(length - got.shape[2], length)[:, None]
        seen[start:length] += (torch.arange(length) <= last).sum(0)[start:]
        own = cutter._rows[0]
        close(own.mass, want[:length], 5 * world.shape.tolerance)
        assert torch.equal(own.queries, seen[:length])
        world.check()
    assert (world.most_away > 0) == has_tiers
    world.cache.close()


def test_a_prompt_is_cut_by_the_attention_that_its_tokens_got() -> None:
    routing = {**ROUTING, "sizing": "attention_entropy"}
    world = CutWorld(page_size=8, routing=routing)
    world.forward([100])
    got = world.weights[0].mean(0).sum(0).float()
    seen = torch.arange(36, 100)[:, None] >= torch.arange(100)
    method = create_sizing("attention_entropy", 8)
    evidence = Evidence(100, attention=got / seen.sum(0))
    pages = world.cache.table.sequences[0].pages
    assert [len(page) for page in pages] == method.sizes(evidence) != [8] * 12 + [4]
    gauge, ended = method.gauge(evidence), 0
    for _ in range(30):
        world.forward([1])
        page = world.cache.table.sequences[0].pages[-1]
        own = world.cache._cutter._rows[0]
        attention = (own.mass / own.queries)[page.tokens]
        done = method.is_tail_done(Evidence(len(page), attention=attention), gauge)
        assert page.sealed == (done or len(page) == page.capacity)
        ended += page.sealed
    assert ended > 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 90), st.integers(0, 40), st.data())
def test_mass_goes_with_the_tokens(count: int, num_new: int, data: st.DataObject) -> None:
    checked = filled(8, count)
    ids = [page.page_id for page in checked.table.sequences[0].pages]
    of_page = torch.rand(2, len(ids))
    by_token = {}  # what the tokens that were there then have each
    for place, page in enumerate(checked.table.sequences[0].pages):
        for token in page.tokens:
            by_token[token] = (place, of_page[:, place] / len(page))
    checked.append_all([num_new])
    checked.commit(0, num_new)
    parts = checked.repage(0, 0, partition(data, count + num_new))
    carrier = Carrier(ids, parts, count)
    history = PageHistory.empty(2, len(ids)).observe(
        of_page, of_page, torch.ones(2, len(ids), dtype=torch.bool)
    )
    history = history.observe(of_page, of_page, torch.rand(2, len(ids)) < 0.5)
    carried = carrier.history(history)
    pages = {page.page_id: page for page in checked.table.sequences[0].pages}
    assert len(set(carrier.ids)) == len(carrier.ids)
    for place, page_id in enumerate(carrier.ids):
        given = [by_token[token] for token in pages[page_id].tokens if token in by_token]
        torch.testing.assert_close(carried.last[:, place], sum(mass for _, mass in given))
        donors = [donor for donor, _ in given]
        assert torch.equal(carried.steps[:, place], history.steps[:, donors].amax(-1))
        assert torch.equal(carried.age[:, place], history.age[:, donors].amin(-1))
    torch.testing.assert_close(carried.total.sum(-1), history.total.sum(-1))


@pytest.mark.parametrize("sizing", SIZINGS)
def test_what_pages_got_is_still_known_after_they_were_cut(sizing: str) -> None:
    torch.manual_seed(0)
    twin = CutTwin(sizing, routing={"router": "ema"})
    twin.forward([100])
    memory = twin.policy._rows[0]
    assert memory._waiting is not None
    seen = memory._waiting[1]
    torch.testing.assert_close(seen.mass.sum(-1), torch.ones(64, 2))
    assert set(seen.page_ids) == {page.page_id for page in twin.cache.table.sequences[0].pages}
    twin.forward([1])
    assert float(memory.history.steps.min()) >= 1
    twin.forward([1])
    before = memory.history
    twin.forward([50])  # the open page is cut; settled first, so its history is of the step before
    cut = memory.history
    assert len(cut.last[0]) == len(memory._page_ids)
    assert float(cut.total.sum()) >= float(before.total.sum()) > 0
    assert cut.last.shape[-1] == len(set(memory._page_ids))
    known = {page.page_id for page in twin.cache.table.sequences[0].pages}
    assert set(memory._page_ids) <= known, "an id that ended is remembered"
    assert twin.policy._rows[0].standing is None


def test_fixed_pages_have_no_cutter_and_no_other_pages() -> None:
    torch.manual_seed(0)
    plain = RoutedTwin(page_size=8, routing=ROUTING)
    assert plain.cache._cutter is None
    assert not plain.cache.tracks_hidden
    plain.forward([61])
    plain.forward([1])
    assert [len(p) for p in plain.cache.table.sequences[0].pages] == [8] * 7 + [6]
    assert open_page_size(plain.cache.config) == 8
    assert open_page_size(OvalConfig(page_size=4)) == 4
    config = OvalConfig(page_size=4, policy="routed", routing={"sizing": "key_similarity"})
    assert open_page_size(config) == 32


def test_dynamic_needs_a_sizer() -> None:
    config = OvalConfig(policy="routed", routing={"sizing": "dynamic", "dense_layers": ()})
    with pytest.raises(ConfigError, match="without a sizer"):
        create_cutter(config, [None] * 4, None)


def test_tiers_must_hold_four_of_the_longest_pages() -> None:
    tiers = {"fast_tokens": 120, "sink_tokens": 4, "recent_tokens": 8}
    CutTwin("key_similarity", tiers={**tiers, "fast_tokens": 300})
    with pytest.raises(ConfigError, match="pages of 32"):
        CutTwin("key_similarity", tiers=tiers)
