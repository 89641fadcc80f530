"""Key signals equal their formulas, written out token by token."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oval_core.routing.key_signals import (
    SIGNALS,
    Arkvale,
    Estimate,
    Infllm,
    MeanKey,
    Quest,
    Sketch,
    create_signal,
    group_log_mass,
    page_scores,
)

SCALING = 0.3


def score(name: str, query: torch.Tensor, keys: torch.Tensor, **options: torch.Tensor) -> float:
    signal = create_signal(name, SCALING)
    summary = signal.summarise(keys, **options)
    return float(signal.score(query[None], summary[None, None]))


def keys_of(tokens: int, dim: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dim, generator=generator), torch.randn(tokens, dim, generator=generator)


@given(st.integers(1, 9), st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_quest_is_its_formula_and_bounds_every_token(tokens: int, seed: int) -> None:
    query, keys = keys_of(tokens, seed=seed)
    columns = zip(query.tolist(), keys.T.tolist(), strict=True)
    want = sum(max(q * min(column), q * max(column)) for q, column in columns)
    got = score("quest", query, keys)
    assert got == pytest.approx(SCALING * want, abs=1e-5)
    assert got >= float((keys @ query).max()) * SCALING - 1e-5


def test_arkvale_is_quest_on_one_mean_deviation_around_the_centre() -> None:
    query, keys = keys_of(6)
    want = 0.0
    for q, column in zip(query.tolist(), keys.T.tolist(), strict=True):
        centre = (min(column) + max(column)) / 2
        radius = sum(abs(k - centre) for k in column) / len(column)
        want += max(q * (centre - radius), q * (centre + radius))
    assert score("arkvale", query, keys) == pytest.approx(SCALING * want, abs=1e-5)


def test_mean_key_is_the_mean_of_the_products() -> None:
    query, keys = keys_of(7)
    want = SCALING * float((keys @ query).mean())
    assert score("mean_key", query, keys) == pytest.approx(want, abs=1e-5)


def test_estimate_is_exact_for_one_token() -> None:
    query, keys = keys_of(1)
    want = SCALING * float(keys[0] @ query)
    assert score("estimate", query, keys) == pytest.approx(want, abs=1e-6)


def test_estimate_is_near_the_mass_of_gaussian_keys() -> None:
    query, keys = keys_of(20_000)
    keys = keys * torch.tensor([0.5, 1.0, 1.5, 2.0, 0.1]) + 0.7
    exact = float((SCALING * keys @ query).logsumexp(0))
    estimate = math.log(len(keys)) + score("estimate", query, keys)
    assert estimate == pytest.approx(exact, abs=0.03)
    # the variance is what makes it so
    assert math.log(len(keys)) + score("mean_key", query, keys) < exact - 0.1


def test_infllm_takes_the_four_tokens_that_received_most() -> None:
    query, keys = keys_of(7)
    received = torch.tensor([0.1, 0.9, 0.0, 0.8, 0.7, 0.2, 0.6])
    want = SCALING * float((keys[[1, 3, 4, 6]] @ query).mean())
    assert score("infllm", query, keys, received=received) == pytest.approx(want, abs=1e-5)
    without = score("infllm", query, keys)
    assert without == pytest.approx(score("mean_key", query, keys), abs=1e-6)


@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("tokens", [1, 3, 6])
def test_padding_changes_nothing(name: str, tokens: int) -> None:
    query, keys = keys_of(tokens)
    received = torch.linspace(0.2, 0.9, tokens)
    padded = torch.cat((torch.full((2, 5), 50.0), keys, torch.full((3, 5), -70.0)))
    valid = torch.tensor([False] * 2 + [True] * tokens + [False] * 3)
    own = torch.cat((torch.ones(2), received, torch.ones(3)))
    want = score(name, query, keys, received=received)
    got = score(name, query, padded, valid=valid, received=own)
    assert got == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("name", SIGNALS)
def test_many_pages_and_low_precision_at_once(name: str) -> None:
    query, _ = keys_of(1)
    keys = torch.randn(2, 3, 6, 5).bfloat16()
    signal = create_signal(name, SCALING)
    summaries = signal.summarise(keys)
    assert summaries.dtype == torch.float32
    for i in range(2):
        for j in range(3):
            got = float(signal.score(query[None], summaries[i, j][None, None]))
            assert got == pytest.approx(score(name, query, keys[i, j].float()), abs=1e-5)


def test_a_sketch_is_exact_where_keys_lie_in_a_plane() -> None:
    query, keys = keys_of(7)
    plane = torch.randn(2, 5)
    keys = torch.randn(5) + torch.randn(7, 2) @ plane
    exact = float((SCALING * keys @ query).logsumexp(0))
    assert score("sketch", query, keys) == pytest.approx(exact, abs=1e-4)


def test_a_sketch_takes_what_lies_outside_its_plane_for_noise() -> None:
    torch.manual_seed(0)
    errors = {"sketch": [], "estimate": [], "mean_key": []}
    for _ in range(200):
        strong = torch.randn(16, 2) @ (3.0 * torch.randn(2, 32))
        keys, query = strong + 0.5 * torch.randn(16, 32), torch.randn(32)
        exact = float((SCALING * keys @ query).logsumexp(0))
        for name, found in errors.items():
            rest = math.log(16) if create_signal(name, SCALING).is_mean else 0.0
            found.append(score(name, query, keys) + rest - exact)
    worst = {name: sum(map(abs, found)) / len(found) for name, found in errors.items()}
    assert worst["sketch"] < 0.35 * min(worst["estimate"], worst["mean_key"])
    assert abs(sum(errors["sketch"]) / 200) < 0.3


def test_a_sketch_keeps_its_axes_at_right_angles_and_unit_length() -> None:
    signal = create_signal("sketch", SCALING, most_tokens=6)
    keys = torch.randn(4, 6, 5)
    axes = signal.summarise(keys)[:, 5:15].view(4, 2, 5)
    torch.testing.assert_close(axes @ axes.transpose(1, 2), torch.eye(2).expand(4, 2, 2))
    largest = torch.linalg.svdvals(keys - keys.mean(1, keepdim=True))[:, :2].square().sum(-1)
    centred = keys - keys.mean(1, keepdim=True)
    caught = (centred @ axes.transpose(1, 2)).square().sum((-1, -2))
    assert bool((caught > 0.94 * largest).all())


def test_each_query_head_is_scored_with_its_kv_head() -> None:
    phi, summaries = torch.randn(6, 4), torch.randn(2, 5, 4)
    got = page_scores(phi, summaries)
    for head in range(6):
        torch.testing.assert_close(got[head], summaries[head // 3] @ phi[head])


def test_group_mass_is_the_mean_of_softmaxes_over_existing_pages() -> None:
    scores = torch.randn(2, 3, 4, 5)  # steps, layers, heads, pages
    counts = torch.tensor([[4, 1, 3, 0, 0], [4, 1, 8, 2, 1]])
    groups = (0, 1, 1)
    got = group_log_mass(scores, counts, groups, is_mean=True).exp()
    plain = group_log_mass(scores, counts, groups).exp()
    for step in range(2):
        for group, layers in ((0, [0]), (1, [1, 2])):
            want, bare = torch.zeros(5), torch.zeros(5)
            for layer in layers:
                for head in range(4):
                    weights = scores[step, layer, head].exp() * (counts[step] > 0)
                    mass = weights * counts[step]
                    want += mass / mass.sum() / (4 * len(layers))
                    bare += weights / weights.sum() / (4 * len(layers))
            torch.testing.assert_close(got[step, group], want)
            torch.testing.assert_close(plain[step, group], bare)


def test_a_page_of_hardly_any_mass_keeps_its_rank() -> None:
    scores = torch.tensor([0.0, -200.0, -300.0]).expand(1, 1, 3)
    logs = group_log_mass(scores, torch.ones(3, dtype=torch.long), (0,))
    assert logs[0, 1] > logs[0, 2] > float("-inf")


def test_the_names_are_those_of_the_classes() -> None:
    assert {
        "quest": Quest,
        "sketch": Sketch,
        "arkvale": Arkvale,
        "mean_key": MeanKey,
        "estimate": Estimate,
        "infllm": Infllm,
    } == SIGNALS
