"""`cover` and `missing_share` against brute force."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from oval_core.routing.repair import cover, missing_share
from oval_core.values import LayerSpec


def shares_of(read: torch.Tensor, estimates: torch.Tensor, unread: torch.Tensor) -> torch.Tensor:
    """Returns [W, P]: the estimated share of each unread page, mean over heads, float64."""
    missing = estimates.double().exp() * unread
    total = read.double().exp().sum(-1, keepdim=True) + missing.sum(-1, keepdim=True)
    return (missing / total).mean(0)


def case(seed: int, queries: int = 1, pages: int = 9) -> tuple[torch.Tensor, ...]:
    made = torch.Generator().manual_seed(seed)
    read = torch.randn(3, queries, 4, generator=made) * 2
    estimates = torch.randn(3, queries, pages, generator=made) * 2
    return read, estimates, torch.rand(pages, generator=made) < 0.8


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("coverage", [0.3, 0.7, 0.9, 0.99])
def test_no_smaller_set_would_do(seed: int, coverage: float) -> None:
    read, estimates, unread = case(seed)
    chosen = cover(read, estimates, unread, coverage)
    shares = shares_of(read, estimates, unread)[0]
    assert not (chosen & ~unread).any()
    assert float(shares[unread & ~chosen].sum()) <= 1 - coverage + 1e-6
    places = unread.nonzero()[:, 0].tolist()
    for smaller in combinations(places, max(0, int(chosen.sum()) - 1)):
        left = [i for i in places if i not in smaller]
        if int(chosen.sum()):
            assert float(shares[left].sum()) > 1 - coverage - 1e-6


@pytest.mark.parametrize("queries", [1, 3])
def test_more_coverage_reads_more(queries: int) -> None:
    read, estimates, unread = case(5, queries, 30)
    before = torch.zeros(30, dtype=torch.bool)
    sizes = set()
    for coverage in (0.05, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0):
        chosen = cover(read, estimates, unread, coverage)
        assert (chosen | before).equal(chosen)
        before = chosen
        sizes.add(int(chosen.sum()))
    assert len(sizes) > 4
    assert torch.equal(before, unread)


@pytest.mark.parametrize("seed", range(6))
def test_every_query_is_covered(seed: int) -> None:
    read, estimates, unread = case(seed, queries=5, pages=20)
    chosen = cover(read, estimates, unread, 0.8)
    left = shares_of(read, estimates, unread & ~chosen)
    all_left = shares_of(read, estimates, unread)[:, unread & ~chosen].sum(-1)
    assert left.shape == (5, 20)
    assert float(all_left.max()) <= 0.2 + 1e-6
    assert not chosen.equal(unread)


def test_what_is_good_enough_stays_as_it_is() -> None:
    read = torch.full((2, 1, 1), 10.0)
    chosen = cover(read, torch.zeros(2, 1, 3), torch.ones(3, dtype=torch.bool), 0.9)
    assert not chosen.any()


def test_nothing_unread_and_nothing_seen() -> None:
    nothing = torch.zeros(3, dtype=torch.bool)
    assert not cover(torch.zeros(2, 1, 1), torch.zeros(2, 1, 3), nothing, 0.5).any()
    blind = torch.full((2, 1, 1), float("-inf"))  # a query that sees no key that was read
    chosen = cover(blind, torch.tensor([[[2.0, 0.0]], [[2.0, 0.0]]]), ~nothing[:2], 0.8)
    assert chosen.tolist() == [True, False]


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("queries", [1, 4])
def test_the_missing_share_equals_brute_force(heads: int, queries: int) -> None:
    keys, query = torch.randn(2, 20, 8), torch.randn(queries, heads, 8)
    kv_of = torch.arange(heads) // (heads // 2)
    scores = torch.einsum("whd,hld->hwl", query, keys[kv_of]).double() * 0.3
    weights = scores.softmax(-1)
    pages = {"read": [(0, 5), (5, 8)], "more": [(8, 10)], "unread": [(10, 17), (17, 20)]}
    lse = torch.stack([scores[..., a:b].logsumexp(-1) for a, b in pages["read"]], -1).float()
    unread = [keys[:, a:b] for a, b in pages["unread"]]
    more = [keys[:, a:b] for a, b in pages["more"]]
    want = weights[..., 10:].sum(-1).mean()
    assert missing_share(lse, query, unread, LayerSpec(0.3), more) == pytest.approx(
        float(want), abs=1e-6
    )
    want = (weights[..., 10:].sum(-1) / (1 - weights[..., 8:10].sum(-1))).mean()
    assert missing_share(lse, query, unread, LayerSpec(0.3)) == pytest.approx(float(want), abs=1e-6)
    assert missing_share(lse, query, [], LayerSpec(0.3)) == 0.0


def test_a_soft_cap_bends_what_was_missed_too() -> None:
    torch.manual_seed(0)
    query, keys = 4.0 * torch.randn(1, 2, 8), torch.randn(1, 12, 8)
    capped = 3.0 * torch.tanh(0.5 * torch.einsum("whd,knd->hwn", query, keys) / 3.0)
    lse, unread = capped[..., :4].logsumexp(-1, keepdim=True), [keys[:, 4:]]
    want = capped.softmax(-1)[..., 4:].sum(-1).mean()
    got = missing_share(lse, query, unread, LayerSpec(0.5, softcap=3.0))
    assert got == pytest.approx(float(want), abs=1e-5)
    assert got != pytest.approx(missing_share(lse, query, unread, LayerSpec(0.5)), abs=1e-3)
