"""Locality: features of distance equal their formula; a graph layer equals the dense one, gradients too."""

import math

import pytest
import torch

from oval_core.errors import ConfigError
from oval_core.routing.graph_conv import GraphConv
from oval_core.routing.locality import (
    DECAY_PAGES,
    NOMINAL_PAGE_TOKENS,
    NUM_FEATURES,
    NUM_FREQUENCIES,
    decay_features,
    decay_waves,
)
from oval_core.routing.view import PageHistory, PageView


def formula(distance_tokens: float, page_tokens: float) -> list[float]:
    """Slow oracle: the features of one page, number by number."""
    d = distance_tokens / page_tokens
    decay = math.exp(-d / 32)
    waves = [100 ** (-i / NUM_FREQUENCIES) for i in range(NUM_FREQUENCIES)]
    cosines = [decay * math.cos(w * d) for w in waves]
    sines = [decay * math.sin(w * d) for w in waves]
    return [*cosines, *sines, decay, math.log(1 + d) / math.log(33)]


@pytest.mark.parametrize("page_tokens", [NOMINAL_PAGE_TOKENS, 1.0, 23.5])
def test_features_equal_the_formula(page_tokens: float) -> None:
    distance = torch.tensor([[0.0, 1.0, 16.0], [100.0, 700.0, 8000.0]])
    features = decay_features(distance, page_tokens)
    assert features.shape == (2, 3, NUM_FEATURES)
    expected = [[formula(d, page_tokens) for d in row] for row in distance.tolist()]
    torch.testing.assert_close(features, torch.tensor(expected), atol=2e-5, rtol=1e-5)


def test_decay_is_the_articles() -> None:
    pages = torch.tensor([0.0, DECAY_PAGES, 64.0])
    decay = decay_features(pages * NOMINAL_PAGE_TOKENS)[..., -2]
    torch.testing.assert_close(decay, torch.tensor([1.0, math.exp(-1), math.exp(-2)]))


def test_features_take_the_distances_of_a_view_of_many_steps() -> None:
    starts, counts = torch.tensor([0, 1, 33, 40]), torch.tensor([1, 32, 7, 16])
    view = PageView(starts, counts, torch.tensor([56, 70]), PageHistory.empty(2, 1, 4))
    features = decay_features(view.distance)
    assert features.shape == (2, 4, NUM_FEATURES)
    torch.testing.assert_close(features[1, 2], torch.tensor(formula(30, 16)))


def test_features_keep_telling_far_pages_apart() -> None:
    features = decay_features(torch.arange(0, 2**20, 1024))
    assert features.isfinite().all()
    assert features.abs().max() < 4
    assert (features[1:, -1] > features[:-1, -1]).all()


@pytest.mark.parametrize("page_tokens", [0, -1.0, float("nan"), float("inf")])
def test_a_bad_page_size_is_refused(page_tokens: float) -> None:
    with pytest.raises(ConfigError, match="page_tokens: got .* Allowed: a number above 0"):
        decay_features(torch.zeros(1), page_tokens)


def test_waves_take_any_number_of_frequencies() -> None:
    waves = decay_waves(torch.tensor([[3.0]]), 6)
    assert waves.shape == (1, 1, 12)
    expected = math.exp(-3 / 32) * math.sin(3 * 100 ** (-5 / 6))
    assert waves[0, 0, -1].item() == pytest.approx(expected)


def random_adjacency(size: int) -> torch.Tensor:
    """A symmetric matrix with about half of its entries zero."""
    upper = torch.rand(size, size, dtype=torch.float64).triu()
    upper = upper * (torch.rand(size, size) > 0.5)
    return upper + upper.T


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (0,)])
@pytest.mark.parametrize("is_sparse", [True, False])
def test_the_layer_equals_the_dense_formula(lead: tuple[int, ...], is_sparse: bool) -> None:
    conv = GraphConv(4, 6).double()
    torch.nn.init.normal_(conv.bias)
    dense = random_adjacency(5)
    features = torch.randn(*lead, 5, 4, dtype=torch.float64, requires_grad=True)
    inputs = (features, conv.weight, conv.bias)
    out = conv(features, dense.to_sparse() if is_sparse else dense)
    expected = (torch.einsum("ij,...je,ef->...if", dense, features, conv.weight) + conv.bias).relu()
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(expected)
    got = torch.autograd.grad((out * weights).sum(), inputs)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    torch.testing.assert_close(got, wanted)


def test_the_layer_takes_an_activation_and_half_precision() -> None:
    conv = GraphConv(3, 3, torch.tanh)
    dense = random_adjacency(5).float()
    features = torch.randn(2, 5, 3)
    expected = torch.tanh(dense @ features @ conv.weight + conv.bias)
    torch.testing.assert_close(conv(features, dense.to_sparse()), expected)
    half = conv.bfloat16()(features.bfloat16(), dense.to_sparse())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, atol=0.05, rtol=0.05)


def test_a_sparse_adjacency_is_never_made_dense() -> None:
    size = 2_000_000  # dense: 16 TB
    index = torch.arange(size).expand(2, -1)
    ones = torch.sparse_coo_tensor(
        index, torch.ones(size), (size, size), is_coalesced=True, check_invariants=False
    )
    conv = GraphConv(1, 1)
    features = torch.ones(size, 1, requires_grad=True)
    out = conv(features, ones)
    out.sum().backward()
    torch.testing.assert_close(out[-1], conv.weight[0].relu())
    assert features.grad.shape == (size, 1)


@pytest.mark.parametrize(
    ("features", "adjacency"),
    [((5, 3), (5, 5)), ((5, 4), (4, 4)), ((5, 4), (5, 6)), ((4,), (4, 4))],
)
def test_shapes_that_do_not_fit_are_refused(features: tuple, adjacency: tuple) -> None:
    with pytest.raises(ConfigError, match=r"Allowed: \[\.\.\., P, 4\] with \[P, P\]"):
        GraphConv(4, 2)(torch.zeros(features), torch.zeros(adjacency))
    with pytest.raises(ConfigError, match=r"out_features: got 0\. Allowed: 1 or more"):
        GraphConv(4, 0)
