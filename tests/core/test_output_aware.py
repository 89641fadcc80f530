"""The trained router: every part can be left out, learns, and scores the same however it is asked."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from oval_core.errors import ConfigError
from oval_core.routing.features import history_features
from oval_core.routing.key_signals import SIGNALS
from oval_core.routing.loss import routing_loss
from oval_core.routing.output_aware import OutputAwareRouter, RouterConfig
from oval_core.routing.rivals import by_signal
from oval_core.routing.view import EPS, PageHistory, PageView

HIDDEN, PAGES = 6, 11
BASE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_groups": 2,
    "embedding_size": 5,
    "mlp_size": 7,
    "num_pages": 8,
    "signals": ("estimate", "quest"),
}
PARTS: dict[str, dict[str, Any]] = {
    "all": {},
    "no content": {"content": False},
    "no decay": {"decay": False},
    "no graph": {"graph": False},
    "no history": {"history": False},
    "no signals": {"signals": ()},
    "one signal": {"signals": ("mean_key",)},
    "absolute head": {"head": "absolute"},
    "whole layer": {"lora_rank": 0},
    "content only": {"decay": False, "graph": False, "history": False, "signals": ()},
    "absolute only": {
        "head": "absolute",
        "decay": False,
        "graph": False,
        "history": False,
        "signals": (),
    },
    "history only": {"content": False, "decay": False, "graph": False, "signals": ()},
}


def view_of(*steps: int, groups: int = 2) -> PageView:
    """A view of 11 pages, with leading dimensions `steps`."""
    counts = torch.tensor([4, 4, 8, 1, 4, 4, 16, 4, 4, 4, 3])
    shape = (*steps, groups, PAGES)
    history = PageHistory.empty(*shape)
    for _ in range(4):
        mass, read = torch.rand(shape) / PAGES, torch.rand(shape) < 0.7
        history = history.observe(mass, mass * 2, read)
    graph = torch.rand(PAGES, PAGES) * (torch.rand(PAGES, PAGES) < 0.3)
    return PageView(
        starts=counts.cumsum(0) - counts,
        counts=counts,
        length=56 + torch.arange(steps[0]) if steps else 56,
        history=history,
        hidden=torch.randn(*steps, HIDDEN),
        page_hidden=torch.randn(PAGES, HIDDEN),
        signals={name: torch.randn(shape).log_softmax(-1) for name in SIGNALS},
        graph=graph + graph.T,
        lead=4,
    )


def trained(**changes: Any) -> OutputAwareRouter:
    """A router with no weight at its start."""
    router = OutputAwareRouter(RouterConfig(**{**BASE, **changes}))
    with torch.no_grad():
        for weight in router.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    return router


@pytest.mark.parametrize("part", sorted(PARTS))
def test_every_part_learns(part: str) -> None:
    router = OutputAwareRouter(RouterConfig(**{**BASE, **PARTS[part]})).train()
    view, before = view_of(3), {n: p.clone() for n, p in router.named_parameters()}
    optimizer = torch.optim.SGD(router.parameters(), 0.5)
    target, ok = torch.rand(3, 2, PAGES), torch.ones(PAGES, dtype=torch.bool)
    for _ in range(3):  # some weights are zero at first, and so is the slope of what they multiply
        optimizer.zero_grad()
        routing_loss(router.score(view), target, ok).backward()
        assert all(torch.isfinite(p.grad).all() for p in router.parameters())
        optimizer.step()
    constants = {"mlp.2.bias", *(() if router.config.graph else ("embed.1.bias",))}
    for name, weight in router.named_parameters():
        if name not in constants:  # what is the same for every page does not matter
            assert not torch.equal(weight, before[name]), name


@pytest.mark.parametrize("part", sorted(PARTS))
def test_what_a_router_needs_is_all_it_reads(part: str) -> None:
    router = trained(**PARTS[part]).eval()
    view = view_of()
    optional = {"hidden", "page_hidden", "graph"}
    gone = dict.fromkeys(optional - router.needs)
    signals = {name: view.signals[name] for name in router.needs - optional}
    scores = router.score(dataclasses.replace(view, signals=signals, **gone))
    assert scores.shape == (2, PAGES)
    assert torch.equal(scores, router.score(view))
    assert not torch.equal(scores[:, 0], scores[:, 1])


@pytest.mark.parametrize("part", sorted(PARTS))
def test_the_frozen_part_of_lora_stays(part: str) -> None:
    router = OutputAwareRouter(RouterConfig(**{**BASE, **PARTS[part]}))
    names = {name for name, _ in router.named_parameters()}
    config = router.config
    assert ("head.3.lora_a" in names) == (config.content and config.lora_rank > 0)
    assert ("head.3.weight" in names) == (config.content and config.lora_rank == 0)


def test_evaluation_is_exact_and_training_draws() -> None:
    router, view = trained(), view_of()
    router.eval()
    assert torch.equal(router.score(view), router.score(view))
    assert torch.equal(router(view), router.score(view))
    router.train()
    draws = torch.stack([router.score(view) for _ in range(400)]).detach()
    assert not torch.equal(draws[0], draws[1])
    router.eval()
    noise = draws - router.score(view).detach()  # Gumbel's mean is .577, its deviation 1.28
    assert float(noise.mean()) == pytest.approx(0.5 * 0.577, abs=0.05)
    assert 0.5 < float(noise.std()) < 0.9


@pytest.mark.parametrize("part", sorted(PARTS))
@pytest.mark.parametrize("is_sparse", [False, True])
def test_steps_together_equal_steps_one_by_one(part: str, is_sparse: bool) -> None:
    router, view = trained(**PARTS[part]).eval(), view_of(3)
    if is_sparse:
        view = dataclasses.replace(view, graph=view.graph.to_sparse())
    together = router.score(view)
    for step in range(3):
        alone = dataclasses.replace(
            view,
            length=int(view.length[step]),
            history=view.history.map(lambda t, i=step: t[i]),
            hidden=view.hidden[step],
            signals={name: s[step] for name, s in view.signals.items()},
        )
        torch.testing.assert_close(router.score(alone), together[step])


def test_a_sparse_graph_equals_a_dense_one() -> None:
    router, view = trained().eval(), view_of()
    sparse = dataclasses.replace(view, graph=view.graph.to_sparse())
    torch.testing.assert_close(router.score(view), router.score(sparse))
    other = dataclasses.replace(view, graph=torch.eye(PAGES))
    assert not torch.allclose(router.score(view), router.score(other))


@pytest.mark.parametrize(
    ("field", "part"),
    [("hidden", "content"), ("page_hidden", "content"), ("graph", "graph"), ("lead", "decay")],
)
def test_every_input_matters(field: str, part: str) -> None:
    router, view = trained().eval(), view_of()
    other = view_of()
    changed = dataclasses.replace(view, **{field: 16 if field == "lead" else getattr(other, field)})
    assert not torch.allclose(router.score(view), router.score(changed)), part


def test_features_of_the_history_are_logs_of_masses() -> None:
    view = view_of()
    history, features = view.history, history_features(view)
    mean = history.total / history.steps.clamp(min=1)
    masses = (history.last, history.fast, history.slow, mean, history.peak)
    for i, mass in enumerate(masses):
        torch.testing.assert_close(features[..., i], ((mass + EPS).log() + 6) / 3)
    assert torch.equal(features[..., 5], history.chosen)
    torch.testing.assert_close(features[..., 6], (1 + history.age).log() / 4)


def test_a_new_router_ranks_by_mass_and_signals() -> None:
    router, view = OutputAwareRouter(RouterConfig(**{**BASE, "content": False})).eval(), view_of()
    history = view.history
    logs = sum((m + EPS).log() for m in (history.last, history.fast, history.slow)) / 3
    signals = sum(view.signals[n].log_softmax(-1) for n in ("quest", "estimate")) / 6
    want, got = logs + signals, router.score(view)
    torch.testing.assert_close(got - got[:, :1], want - want[:, :1], atol=1e-4, rtol=1e-4)


def test_pages_beyond_the_numbers_of_the_absolute_head_share_the_last() -> None:
    router = trained(**PARTS["absolute only"]).eval()
    scores = router.score(view_of())
    assert torch.equal(scores[:, 7:8].expand(-1, 4), scores[:, 7:])
    assert not torch.equal(scores[:, 6], scores[:, 7])


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_size": 0},
        {"num_groups": 0},
        {"head": "deep"},
        {"head": "absolute", "num_pages": 0},
        {"signals": ("luck",)},
        {"lora_rank": -1},
        {"mlp_size": 2.5},
    ],
)
def test_shapes_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Allowed"):
        RouterConfig(**{**BASE, **wrong})


def test_a_config_goes_through_plain_values() -> None:
    config = RouterConfig(**BASE)
    assert RouterConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match="depth"):
        RouterConfig.from_dict({**config.to_dict(), "depth": 3})


@pytest.mark.parametrize(("alpha", "rank"), list(itertools.product([1.0, 8.0], [1, 4])))
def test_the_change_of_low_rank_has_its_factor(alpha: float, rank: int) -> None:
    router = trained(lora_alpha=alpha, lora_rank=rank).eval()
    layer, inputs = router.head[3], torch.randn(3, 7)
    want = inputs @ layer.weight.T + layer.bias
    want = want + alpha / rank * (inputs @ layer.lora_a.T @ layer.lora_b.T)
    torch.testing.assert_close(layer(inputs), want)
    layer.train()
    layer.dropout.p = 1.0
    torch.testing.assert_close(layer(inputs), inputs @ layer.weight.T + layer.bias)


def test_signals_are_routers() -> None:
    view = view_of()
    leads = {router.name: router.lead for router in by_signal()}
    assert leads["freekv"] == leads["freekv_arkvale"] == leads["estimate"] == "step"
    assert leads["sketch"] == "step"
    assert leads["quest"] == leads["arkvale"] == leads["mean_key"] == "layer"
    for router in by_signal():
        (name,) = router.needs
        if name in view.signals:
            assert router.score(view) is view.signals[name]
