"""`MassWatch` by itself: shares over several sources, pages of any size, long forwards, layers of a group that differ."""

from __future__ import annotations

import pytest
import torch

from oval_core.kv_pool import LayerStore
from oval_core.routing.mass_watch import WATCHED_QUERIES, MassWatch, _page_lse, masked_scores
from oval_core.values import LayerSpec, RowPlan

SPEC = LayerSpec(0.5)
HEADS, KV, DIM = 4, 2, 8


def weights_of(query: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns [H, N, L], float64."""
    scores = query.double() @ keys.double().repeat_interleave(HEADS // KV, 0).mT * 0.5
    return scores.masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num(0.0)


def by_page(weights: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    return torch.stack([part.sum(-1) for part in weights.split(sizes, -1)], -1)


def store_of(keys: torch.Tensor) -> LayerStore:
    return LayerStore(keys, torch.zeros_like(keys))


def plan_of(num_new: int, total: int, pages: dict[int, int], **more: object) -> RowPlan:
    length = sum(pages.values())
    return RowPlan(num_new, total, length, (slice(0, length),), pages=tuple(pages.items()), **more)


def watch_one(
    watch: MassWatch, layer: int, query: torch.Tensor, keys: torch.Tensor, plan: RowPlan
) -> None:
    watch.saw(layer, 0, query, store_of(keys), plan, SPEC, None, None)


@pytest.mark.parametrize(
    "sizes",
    [[4, 4, 4], [4, 4, 2], [4], [2, 4, 4], [1, 7, 3, 3, 1], [5, 5, 5, 1, 2], [1, 1, 1]],
)
def test_sums_by_page_of_any_sizes(sizes: list[int]) -> None:
    scores = torch.randn(3, 2, sum(sizes)) * 5
    scores[0, 0] = float("-inf")
    scores[1, 1, : sizes[0]] = float("-inf")
    scores[2, 0] += 500  # no overflow
    got = _page_lse(scores, list(enumerate(sizes)))
    want = torch.stack([part.logsumexp(-1) for part in scores.double().split(sizes, -1)], -1)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sizes", [[4, 4, 4, 3], [2, 9, 1, 3]])
def test_shares_over_sources_are_shares_of_all(sizes: list[int]) -> None:
    """The first pages come last, as they do from a slow tier; the newest tokens are in the first source."""
    query, keys = torch.randn(HEADS, 3, DIM), torch.randn(KV, 15, DIM)
    causal = torch.arange(15) <= torch.arange(12, 15)[:, None]
    watch, split = MassWatch({5: 0}), sum(sizes[:2])
    pages = dict(zip((70, 71, 72, 73), sizes, strict=True))
    late, early = list(pages.items())[2:], list(pages.items())[:2]
    watch_one(watch, 5, query, keys[:, split:], plan_of(3, 15, dict(late)))
    watch_one(watch, 5, query, keys[:, :split], plan_of(3, 15, dict(early), is_past=True))
    seen = watch.row(0)
    assert seen.page_ids == (72, 73, 70, 71)
    want = by_page(weights_of(query, keys, causal), sizes)[..., [2, 3, 0, 1]]
    torch.testing.assert_close(seen.mass[:, 0].double(), want.mean(0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(seen.peak[:, 0].double(), want.amax(0), atol=1e-5, rtol=1e-5)
    assert seen.read.all()
    assert torch.equal(seen.queries[0], query.transpose(0, 1))


def test_only_the_last_queries_of_a_long_forward_count() -> None:
    count = WATCHED_QUERIES + 30
    query, keys = torch.randn(HEADS, count, DIM), torch.randn(KV, count + 6, DIM)
    watch = MassWatch({0: 0})
    pages = {0: 50, 1: count + 6 - 50}
    watch_one(watch, 0, query, keys, plan_of(count, count + 6, pages))
    causal = torch.arange(count + 6) <= torch.arange(6, count + 6)[:, None]
    want = by_page(weights_of(query, keys, causal)[:, 30:], [50, count - 44]).mean(0)
    seen = watch.row(0)
    assert seen.mass.shape == (WATCHED_QUERIES, 1, 2)
    torch.testing.assert_close(seen.mass[:, 0].double(), want, atol=1e-5, rtol=1e-5)


def test_a_mask_of_a_long_forward_counts_for_its_last_queries() -> None:
    count = WATCHED_QUERIES + 9
    query, keys = torch.randn(HEADS, count, DIM), torch.randn(KV, count, DIM)
    bias = torch.randn(1, count, count).masked_fill(
        torch.rand(1, count, count) < 0.5, float("-inf")
    )
    watch, plan = MassWatch({0: 0}), plan_of(count, count, {0: 40, 1: count - 40})
    watch.saw(0, 0, query, store_of(keys), plan, SPEC, bias, None)
    scores = query.double() @ keys.double().repeat_interleave(2, 0).mT * 0.5 + bias
    want = by_page(scores.softmax(-1)[:, 9:], [40, count - 40]).mean(0)
    torch.testing.assert_close(watch.row(0).mass[:, 0].double(), want, atol=1e-5, rtol=1e-5)


def test_layers_of_a_group_may_read_other_pages() -> None:
    """The mean is over the layers that read a page; the peak is the largest of them; another group has no part."""
    watch, want, peaks = MassWatch({0: 0, 1: 0, 3: 1}), [], []
    for layer, pages in ((0, {1: 4, 2: 4, 3: 3}), (1, {2: 4, 3: 3, 4: 4}), (3, {9: 6})):
        total = sum(pages.values())
        query, keys = torch.randn(HEADS, 1, DIM), torch.randn(KV, total, DIM)
        watch_one(watch, layer, query, keys, plan_of(1, total, pages))
        mask = torch.ones(1, total, dtype=torch.bool)
        masses = by_page(weights_of(query, keys, mask), list(pages.values()))
        want.append(dict(zip(pages, masses.mean(0)[0].tolist(), strict=True)))
        peaks.append(dict(zip(pages, masses.amax(0)[0].tolist(), strict=True)))
    seen = watch.row(0)
    place = {page: i for i, page in enumerate(seen.page_ids)}
    assert set(place) == {1, 2, 3, 4, 9}
    for page in (1, 2, 3, 4):
        own = [found[page] for found in want[:2] if page in found]
        assert float(seen.mass[0, 0, place[page]]) == pytest.approx(sum(own) / len(own), abs=1e-6)
        top = max(found[page] for found in peaks[:2] if page in found)
        assert float(seen.peak[0, 0, place[page]]) == pytest.approx(top, abs=1e-6)
        assert not seen.mass[0, 1, place[page]]
    assert seen.read.tolist() == [[i != 9 for i in place], [i == 9 for i in place]]
    assert float(seen.mass[0, 1, place[9]]) == pytest.approx(1.0)


def test_a_query_that_sees_nothing_has_no_mass() -> None:
    query, keys = torch.randn(HEADS, 1, DIM), torch.randn(KV, 4, DIM)
    watch = MassWatch({0: 0})
    hidden = torch.ones(4, dtype=torch.bool)
    watch_one(watch, 0, query, keys, plan_of(1, 5, {1: 4}, is_past=True, hidden=hidden))
    assert not watch.row(0).mass.any()


def test_the_softcap_is_part_of_the_score() -> None:
    query, keys = torch.randn(HEADS, 1, DIM) * 9, torch.randn(KV, 8, DIM)
    watch, spec = MassWatch({0: 0}), LayerSpec(0.5, softcap=2.0)
    watch.saw(0, 0, query, store_of(keys), plan_of(1, 8, {1: 4, 2: 4}), spec, None, None)
    scores = query.double() @ keys.double().repeat_interleave(2, 0).mT * 0.5
    want = by_page((2 * torch.tanh(scores / 2)).softmax(-1), [4, 4]).mean(0)
    torch.testing.assert_close(watch.row(0).mass[:, 0].double(), want, atol=1e-5, rtol=1e-5)


def test_rows_are_apart() -> None:
    watch = MassWatch({0: 0, 1: 0})
    for layer in (0, 1):
        for row in (0, 2):
            query, keys = torch.randn(HEADS, 1, DIM), torch.randn(KV, 4, DIM)
            plan = plan_of(1, 4, {10 * row: 4})
            watch.saw(layer, row, query, store_of(keys), plan, SPEC, None, None)
    assert watch.rows == [0, 2]
    assert watch.row(0).page_ids == (0,)
    assert watch.row(2).page_ids == (20,)
    assert watch.row(2).queries.shape == (2, 1, HEADS, DIM)


@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("past", [0, 4, 11])
@pytest.mark.parametrize("window", [1, 4, 9])
def test_a_window_hides_what_lies_before_it(count: int, past: int, window: int) -> None:
    """Of five new tokens the last are asked for; older keys come from another source, as from a slow tier."""
    total, new = 16, 5
    query, keys = torch.randn(HEADS, count, DIM), torch.randn(KV, total, DIM)
    place = torch.arange(total - count, total)[:, None]
    seen = (torch.arange(total) <= place) & (torch.arange(total) > place - window)
    scores = query.double() @ keys.double().repeat_interleave(HEADS // KV, 0).mT * 0.5
    want = scores.masked_fill(~seen, float("-inf"))
    spec = LayerSpec(0.5, window=window)
    here = plan_of(new, total, {1: total - past}, key_tokens=torch.arange(past, total))
    got = [masked_scores(query, store_of(keys[:, past:]), here, spec, None)]
    if past == total - new:  # all keys that are older, in their order: none has to say which it is
        plan = plan_of(new, total, {0: past}, is_past=True)
        got.insert(0, masked_scores(query, store_of(keys[:, :past]), plan, spec, None))
    elif past:
        plan = plan_of(new, total, {0: past}, is_past=True, key_tokens=torch.arange(past))
        got.insert(0, masked_scores(query, store_of(keys[:, :past]), plan, spec, None))
    torch.testing.assert_close(torch.cat(got, -1).double(), want, atol=1e-5, rtol=1e-5)


def test_one_query_of_a_plain_row_sees_its_window_only() -> None:
    query, keys = torch.randn(HEADS, 1, DIM), torch.randn(KV, 12, DIM)
    spec = LayerSpec(0.5, window=5)
    got = masked_scores(query, store_of(keys), plan_of(1, 12, {0: 12}), spec, None)
    assert (got > float("-inf")).tolist() == [[[False] * 7 + [True] * 5]] * HEADS
