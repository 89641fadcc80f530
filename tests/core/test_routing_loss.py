"""`routing_loss` against plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from oval_core.routing.loss import mean_ahead, routing_loss


def slowly(scores: torch.Tensor, target: torch.Tensor, ok: torch.Tensor, gamma: float) -> float:
    """Rows [R, P], one after the other."""
    rows = []
    for score, weight, can in zip(scores.tolist(), target.tolist(), ok.tolist(), strict=True):
        own = [(s, w) for s, w, c in zip(score, weight, can, strict=True) if c]
        total = sum(w for _, w in own)
        if total <= 0:
            continue
        norm = sum(math.exp(s) for s, _ in own)
        ps = [(math.exp(s) / norm, w / total) for s, w in own]
        rows.append(-sum(y * (1 - p) ** gamma * math.log(p) for p, y in ps))
    return sum(rows) / max(1, len(rows))


@pytest.mark.parametrize("gamma", [0.0, 1.0, 2.0])
def test_equals_plain_loops(gamma: float) -> None:
    scores, target = torch.randn(5, 3, 9).double(), torch.rand(5, 3, 9).double()
    ok = torch.rand(5, 1, 9) < 0.6
    ok[0], target[1, 0] = False, 0.0
    got = routing_loss(scores, target, ok, gamma)
    flat = ok.expand(5, 3, 9).reshape(-1, 9)
    want = slowly(scores.view(-1, 9), target.view(-1, 9), flat, gamma)
    assert float(got) == pytest.approx(want, abs=1e-12)


def test_gamma_zero_is_cross_entropy() -> None:
    scores, target = torch.randn(4, 7), torch.rand(4, 7)
    got = routing_loss(scores, target, torch.ones(7, dtype=torch.bool), 0.0)
    want = torch.nn.functional.cross_entropy(scores, target / target.sum(-1, keepdim=True))
    torch.testing.assert_close(got, want)


def test_a_page_that_is_expected_counts_little() -> None:
    target = torch.tensor([[1.0, 0.0]])
    ok = torch.ones(2, dtype=torch.bool)
    easy, hard = torch.tensor([[4.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    ratio = routing_loss(easy, target, ok) / routing_loss(hard, target, ok)
    plain = routing_loss(easy, target, ok, 0.0) / routing_loss(hard, target, ok, 0.0)
    assert ratio < plain / 100


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
def test_gradients_are_finite(gamma: float) -> None:
    scores = torch.randn(6, 5, requires_grad=True)
    target, ok = torch.rand(6, 5), torch.rand(6, 5) < 0.5
    ok[0], target[1] = False, 0.0
    ok[2] = torch.tensor([True, False, False, False, False])  # a lone candidate is certain
    ok[3], target[3] = True, torch.tensor([1.0, 0, 0, 0, 0])
    sharp = scores * torch.tensor([1.0, 1, 1, 1e4, 1, 1])[:, None]
    routing_loss(sharp, target, ok, gamma).backward()
    assert torch.isfinite(scores.grad).all()
    assert not scores.grad[0].any()
    assert not scores.grad[1].any()
    assert scores.grad[4].any() or not (ok[4] & (target[4] > 0)).sum() > 1


def test_without_any_candidate_the_loss_is_zero() -> None:
    scores = torch.randn(2, 3, requires_grad=True)
    loss = routing_loss(scores, torch.ones(2, 3), torch.zeros(3, dtype=torch.bool))
    loss.backward()
    assert float(loss) == 0.0
    assert not scores.grad.any()


def test_scores_fall_towards_the_target() -> None:
    scores = torch.zeros(1, 6, requires_grad=True)
    target, ok = torch.tensor([[0.5, 0.3, 0.2, 0, 0, 0]]), torch.ones(6, dtype=torch.bool)
    optimizer = torch.optim.Adam([scores], 0.1)
    for _ in range(300):
        optimizer.zero_grad()
        routing_loss(scores, target, ok, 0.0).backward()
        optimizer.step()
    torch.testing.assert_close(scores.softmax(-1), target, atol=0.02, rtol=0.0)


def test_mean_ahead_is_the_mean_of_a_sliding_window() -> None:
    values = torch.randn(9, 2, 3).double()
    for lead in (1, 2, 4, 9):
        want = torch.stack([values[i : i + lead].mean(0) for i in range(9 - lead + 1)])
        torch.testing.assert_close(mean_ahead(values, lead), want)
