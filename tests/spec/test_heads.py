"""Draft heads: formulas against slow ones, what they see, what they own, sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_heads import (
    C,
    V,
    make_parts,
    medusa_logits,
    scatter_weights,
    sequential_states,
)

from oval_core.errors import ConfigError
from oval_spec.heads import DraftHeads, DraftVocabulary, MedusaHeads, create_heads

SEQUENTIAL: list[dict[str, Any]] = [
    {},
    {"form": "prefix"},
    {"form": "prefix", "num_layers": 2},
    {"num_cells": 3, "is_gated": True},
    {"num_cells": 2, "num_layers": 2},
    {"sees_hidden": False},
]


def sequential(context: int = 0, **settings: Any) -> DraftHeads:
    shape = {"num_heads": 3, "hidden_size": C, "mlp_size": 10, "context": context}
    heads = create_heads("sequential", shape | settings)
    scatter_weights(heads)
    return heads.eval()


@pytest.mark.parametrize("settings", SEQUENTIAL)
@torch.no_grad()
def test_sequential_heads_follow_their_formula(settings: dict[str, Any]) -> None:
    heads = sequential(**settings)
    hidden, path = torch.randn(4, C), torch.randn(4, 3, C)
    torch.testing.assert_close(heads(hidden, path), sequential_states(heads, hidden, path))


@pytest.mark.parametrize("settings", [*SEQUENTIAL, {"context": 2}])
@torch.no_grad()
def test_head_k_sees_the_context_and_k_drafted_tokens(settings: dict[str, Any]) -> None:
    heads = sequential(**settings)
    W = heads.context
    hidden, path = torch.randn(2, C), torch.randn(2, W + 3, C)
    before = heads(hidden, path)
    for place in range(W + 3):
        changed = path.clone()
        changed[:, place] = torch.randn(2, C)
        differs = (heads(hidden, changed) != before).any(-1).all(0).tolist()
        assert differs == [k >= place - W for k in range(3)]


@pytest.mark.parametrize("settings", [*SEQUENTIAL, {"context": 2}])
def test_sequential_states_begin_as_the_hidden_state(settings: dict[str, Any]) -> None:
    shape = {"num_heads": 3, "hidden_size": C, "mlp_size": 10}
    heads = create_heads("sequential", shape | settings)
    hidden, path = torch.randn(2, C), torch.randn(2, heads.context + 3, C)
    assert torch.equal(heads(hidden, path), hidden[:, None].expand(2, 3, C))


@torch.no_grad()
def test_context_mixes_by_place() -> None:
    heads = sequential(context=2)
    hidden, path = torch.randn(2, C), torch.randn(2, 5, C)
    swapped = path[:, [1, 0, 2, 3, 4]]
    assert not torch.equal(heads(hidden, path), heads(hidden, swapped))


@torch.no_grad()
def test_medusa_heads_begin_as_upstream_does() -> None:
    """W is zero and b is not: near the identity, not at it."""
    heads = MedusaHeads(2, C, num_layers=2)
    hidden = torch.randn(3, C)
    x = hidden
    for layer in heads.blocks[1]:
        assert not layer.linear.weight.any()
        assert layer.linear.bias.all()
        x = x + torch.nn.functional.silu(layer.linear.bias)
    torch.testing.assert_close(heads.read(hidden, 1), x)


@torch.no_grad()
def test_layers_of_a_head_are_modules_of_their_own() -> None:
    heads = MedusaHeads(2, C, num_layers=3)
    assert len({id(p) for p in heads.parameters()}) == 2 * 3 * 2


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_medusa_heads_follow_their_formula(own: bool, bias: bool) -> None:
    parts = make_parts(3, 2, own=own, bias=bias)
    heads = MedusaHeads(3, C, num_layers=2, has_bias=bias, own_lm_heads=V if own else 0)
    for k, layers in enumerate(parts.layers):
        for n, (weight, b) in enumerate(layers):
            heads.blocks[k][n].linear.weight.copy_(weight)
            if b is not None:
                heads.blocks[k][n].linear.bias.copy_(b)
        if parts.lm_heads is not None:
            heads.lm_heads[k].weight.copy_(parts.lm_heads[k])
    lm_head, hidden = torch.randn(V, C), torch.randn(4, C)
    heads.bind(torch.randn(V, C), lm_head)
    states = heads(hidden, torch.randn(4, 3, C))
    logits = torch.stack([heads.logits(states[:, k], k) for k in range(3)], 1)
    torch.testing.assert_close(logits, medusa_logits(parts, hidden, lm_head))


@torch.no_grad()
def test_logits_are_rows_of_the_lm_head() -> None:
    ids = torch.tensor([7, 3, 30])
    heads = MedusaHeads(1, C, vocabulary=DraftVocabulary(ids, V))
    lm_head, bias, states = torch.randn(V, C), torch.randn(V), torch.randn(5, C)
    heads.bind(torch.randn(V, C), lm_head, bias)
    torch.testing.assert_close(heads.logits(states, 0), (states @ lm_head.T + bias)[:, ids])


@torch.no_grad()
def test_own_lm_heads_begin_as_the_base_s() -> None:
    vocabulary = DraftVocabulary(torch.tensor([2, 9]), V)
    heads = MedusaHeads(2, C, own_lm_heads=2, vocabulary=vocabulary)
    lm_head = torch.randn(V, C)
    heads.bind(torch.randn(V, C), lm_head)
    heads.copy_lm_head()
    assert all(torch.equal(head.weight, lm_head[[2, 9]]) for head in heads.lm_heads)


def test_the_base_s_weights_are_neither_trained_nor_saved_nor_moved() -> None:
    heads = sequential()
    names = set(heads.state_dict())
    embed, lm_head = torch.randn(V, C).bfloat16(), torch.randn(V, C).bfloat16()
    heads.bind(embed, lm_head)
    assert set(heads.state_dict()) == names
    heads.double()
    assert heads.embed(torch.tensor([3])).dtype == torch.float64
    assert heads.logits(torch.randn(1, C).double(), 0).dtype == torch.bfloat16
    assert torch.equal(heads.embed(torch.tensor([3]))[0], embed[3].double())
    assert len(list(heads.parameters())) == len(names)


def test_gradients_reach_every_weight() -> None:
    """Training in float32 on a bfloat16 base."""
    for heads in (sequential(context=2), sequential(form="prefix"), MedusaHeads(3, C)):
        heads.bind(torch.randn(V, C).bfloat16(), torch.randn(V, C).bfloat16())
        hidden, tokens = torch.randn(4, C).bfloat16(), torch.randint(0, V, (4, heads.context + 3))
        states = heads(hidden, heads.embed(tokens))
        sum(heads.logits(states[:, k], k).float().logsumexp(-1).sum() for k in range(3)).backward()
        assert all(w.grad is not None and w.grad.any() for w in heads.parameters())


@pytest.mark.parametrize(
    ("kind", "settings", "millions"),
    [
        ("sequential", {}, 3.55),
        ("sequential", {"num_cells": 4}, 14.18),
        ("sequential", {"form": "prefix"}, 15.95),
        ("medusa", {}, 1.33),
    ],
)
def test_shipped_sizes(kind: str, settings: dict[str, Any], millions: float) -> None:
    with torch.device("meta"):
        heads = create_heads(kind, {"num_heads": 4, "hidden_size": 576} | settings)
    assert sum(w.numel() for w in heads.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("hydra", {}, "Allowed: medusa, sequential"),
        ("medusa", {"heads": 3}, "heads"),
        ("medusa", {"num_heads": 0}, "num_heads 0"),
        ("medusa", {"num_heads": True}, "num_heads True"),
        ("medusa", {"num_layers": 0}, "num_layers 0"),
        ("sequential", {"form": "recurent"}, "did you mean 'recurrent'"),
        ("sequential", {"num_cells": 4}, "num_cells 4"),
        ("sequential", {"num_cells": 2, "form": "prefix"}, "num_cells 2"),
        ("sequential", {"mlp_size": 1.5}, "mlp_size 1.5"),
    ],
)
def test_bad_settings_are_refused(kind: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        create_heads(kind, {"num_heads": 3, "hidden_size": C} | settings)


def test_settings_make_the_same_shape() -> None:
    for heads in (sequential(num_cells=2, context=1), MedusaHeads(2, C, own_lm_heads=9)):
        again = create_heads(heads.kind, heads.settings())
        assert {n: w.shape for n, w in again.state_dict().items()} == {
            n: w.shape for n, w in heads.state_dict().items()
        }


def test_bad_bases_are_refused() -> None:
    heads = MedusaHeads(1, C, vocabulary=DraftVocabulary(torch.tensor([0]), V))
    with pytest.raises(ConfigError, match="before `bind`"):
        heads.embed(torch.tensor([0]))
    with pytest.raises(ConfigError, match="before `bind`"):
        heads.logits(torch.randn(1, C), 0)
    with pytest.raises(ConfigError, match=r"lm_head_weight \[40, 5\]"):
        heads.bind(torch.randn(V, C), torch.randn(V, C - 1))
    with pytest.raises(ConfigError, match="embed_weight"):
        heads.bind(torch.randn(C), torch.randn(V, C))
    with pytest.raises(ConfigError, match="lm_head_bias"):
        heads.bind(torch.randn(V, C), torch.randn(V, C), torch.randn(V - 1))
    with pytest.raises(ConfigError, match="40 tokens"):
        heads.bind(torch.randn(V, C), torch.randn(V - 1, C))
    with pytest.raises(ConfigError, match="own LM heads of 3 rows with 1 draft"):
        MedusaHeads(1, C, own_lm_heads=3, vocabulary=heads.vocabulary)
