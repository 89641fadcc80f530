"""Routers and settings of policies that select, right and wrong: what `attach` and `generate` say to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import assert_same_run, build, one_thread, prompt, run, shared
from tiny_routers import ALL, GEMMA, routed, router_for

from oval_adapters import attach
from oval_adapters.routing.resolve import model_facts
from oval_core import OVALRouter
from oval_core.errors import ConfigError
from oval_core.routing.checkpoint import TrainedRouter, save_router
from oval_core.routing.output_aware import OutputAwareRouter, RouterConfig

_one_thread = pytest.fixture(autouse=True)(one_thread)


def test_a_router_of_the_call(caplog: pytest.LogCaptureFixture) -> None:
    model = shared("llama")
    size = model.config.hidden_size
    with attach(model, routed(router="recency")):
        plain, random = run(model, prompt(70)), OVALRouter(size, 40)
        assert_same_run(
            run(model, prompt(70), oval_router=random.eval()),
            run(model, prompt(70), oval_router=random),
        )
        mine = run(model, prompt(70), oval_router=router_for(model))
        assert mine.sequences.tolist() != plain.sequences.tolist()
        assert caplog.text == ""
        run(model, prompt(70), oval_router=random.train())
        assert "training mode" in caplog.text
        more = torch.cat([plain.sequences, prompt(3)], 1)
        run(model, more, cache=plain.cache, oval_router=random.eval())
        assert "the call brings a cache" in caplog.text


class Odd:
    """A router that is wrong in one way."""

    name, lead, needs = "odd", "step", frozenset()

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)

    def score(self, view: Any) -> torch.Tensor:
        """Returns one score for all."""
        return torch.zeros(1)


WRONG: dict[str, tuple[Any, str]] = {
    "shape": (lambda m: Odd(), r"'odd' gave scores \[1\]. Allowed: 2 selections x 18 pages"),
    "needs": (lambda m: Odd(needs=["hidden"]), r"needs \['hidden'\]. Allowed: a set"),
    "unknown need": (lambda m: Odd(needs={"hiden"}), "no cache knows it"),
    "lead": (lambda m: Odd(lead="soon"), "lead 'soon'.*Allowed: lead 'step', or 'layer'"),
    "by layer": (lambda m: Odd(lead="layer"), "'layer' with a signal"),
    "article": (lambda m: OVALRouter(32, 40).eval(), "hidden size 32. Allowed with this model: 48"),
    "groups": (lambda m: router_for(m, groups=3), "makes 2 with dense_layers.*this router: 3"),
    "recording": (lambda m: router_for(m, signals=["infllm"]), "while a model decodes"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_router_of_the_call_is_named(wrong: str) -> None:
    model = shared("llama")
    make, message = WRONG[wrong]
    with attach(model, routed(router="sketch")):
        with pytest.raises(ConfigError, match=message):
            run(model, prompt(70), oval_router=make(model))
        assert run(model, prompt(70)).sequences.shape[1] == 82


def test_groups_are_those_of_layers_without_a_window(tmp_path: Path) -> None:
    model = build("gemma3", num_hidden_layers=4, layer_types=GEMMA)
    for groups in (2, 3):
        save_router(tmp_path / str(groups), TrainedRouter(router=router_for(model, groups)))
    with attach(model, routed(router=str(tmp_path / "2"), dense_layers=[])) as oval:
        run(model, prompt(70))
        assert oval.stats()["routing"]["selections"] == 11
    with pytest.raises(ConfigError, match="got 3, which makes 2 .*Allowed with this router: 3"):
        attach(model, routed(router=str(tmp_path / "3"), dense_layers=[]))


def test_routers_of_other_models_are_refused(tmp_path: Path) -> None:
    model, other = shared("llama"), shared("qwen3")
    save_router(
        tmp_path / "a", TrainedRouter(router=router_for(model), model=model_facts(other.config))
    )
    with pytest.raises(ConfigError, match="was trained for .*qwen3.*Got .*llama.*Allowed"):
        attach(model, routed(router=str(tmp_path / "a")))
    unsaid = OutputAwareRouter(RouterConfig(hidden_size=32, num_groups=2))
    save_router(tmp_path / "b", TrainedRouter(router=unsaid))
    with pytest.raises(ConfigError, match="hidden size 32. Allowed with this model: 48"):
        attach(model, routed(router=str(tmp_path / "b")))
    attach(model).detach()


SETTINGS: dict[str, tuple[Any, str]] = {
    "share 0": ({"budget_share": 0}, "budget_share: got 0. Allowed: above 0, up to 1"),
    "share 1.5": ({"budget_share": 1.5}, "budget_share: got 1.5"),
    "share text": ({"budget_share": "20%"}, "budget_share: got '20%'"),
    "budget 0": ({"token_budget": 0}, "token_budget: got 0. Allowed: 1 or more"),
    "lead 0": ({"lead": 0}, "lead: got 0"),
    "audits": ({"audit_every": 0}, "audit_every: got 0"),
    "typo": ({"rooter": "sketch"}, "'routing.rooter': did you mean 'router'"),
    "router": ({"router": "skecth"}, "did you mean 'sketch'.*Or the folder"),
    "folder": ({"router": "no/such"}, "oval_config.json cannot be read.*Allowed: a folder"),
    "measured only": ({"router": "oracle_mass"}, "no cache knows it.*Allowed"),
    "all dense": ({"dense_layers": [0, 1, 2]}, r"dense_layers: got \[0, 1, 2\] for 3 .*Allowed"),
    "no such layer": ({"dense_layers": [3]}, r"dense_layers: got \[3\]"),
}


@pytest.mark.parametrize("wrong", SETTINGS)
def test_wrong_settings_are_refused_by_attach(wrong: str) -> None:
    model = shared("llama")
    settings, message = SETTINGS[wrong]
    with pytest.raises(ConfigError, match=message) as caught:
        attach(model, routed(**settings))
    assert "oracle_mass, " not in str(caught.value), "a name is suggested that cannot decode"
    attach(model).detach()


@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [
        ({"budget_share": 1}, None, None),
        ({"token_budget": 1}, 6, 12),  # sinks and window are read in any case, in whole pages
        ({"lead": 100}, 6, 24),
        ({"window_size": ALL}, ALL, ALL),
        ({"layer_groups": ALL}, 6, 24),
        ({"token_budget": 8, "budget_share": 0.5}, 30, 50),  # the share is in place of the tokens
    ],
)
def test_settings_at_their_limits(
    settings: dict[str, Any], least: int | None, most: int | None
) -> None:
    model = shared("llama")
    with attach(model, routed(router="sketch", **settings)) as oval:
        assert run(model, prompt(70)).sequences.shape[1] == 82
        stats = oval.stats()["routing"]
    if least is None:
        assert (stats["selections"], stats["read_share"]) == (0, None)
    else:
        mean = stats["tokens_read"] / stats["selections"] / 2  # layers
        length = stats["tokens_present"] / stats["selections"] / 2
        assert min(least, length) <= mean <= min(most, length)


def test_the_shipped_configuration() -> None:
    model = build("llama", num_hidden_layers=4)
    with attach(model, "routed") as oval:
        run(model, prompt(500), max_new_tokens=4)
        stats = oval.stats()["routing"]
    assert (stats["router"], stats["budget_share"], stats["selections"]) == ("sketch", 0.2, 3)
    assert 0.15 < stats["read_share"] <= 0.2
