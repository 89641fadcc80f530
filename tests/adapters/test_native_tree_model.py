"""Attached models on the compiled attention of a few new tokens: logits of trees and chains, and texts in float32."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from reference_speculative import ScriptedDrafter
from reference_tree import RandomTree
from tiny_models import VOCAB, build, one_thread, prompt, shared
from transformers import PreTrainedModel

from oval_adapters import attach
from oval_adapters.load_model import load_model
from oval_core.native import unavailable_reason
from oval_core.native.tree import TreeKernel

_one_thread = pytest.fixture(autouse=True)(one_thread)
pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=f"{unavailable_reason()}")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of queries that the kernel was given."""
    seen: list[int] = []
    original = TreeKernel.__call__

    def call(self: TreeKernel, query: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(query.shape[1])
        return original(self, query, *rest)

    monkeypatch.setattr(TreeKernel, "__call__", call)
    return seen


def logits_of(
    model: PreTrainedModel, config: dict[str, Any], ids: torch.Tensor, tree: RandomTree
) -> torch.Tensor:
    """Logits of two forwards of the tree behind 70 tokens or more; a path is accepted in between."""
    text, nodes = ids[:, : -len(tree)], ids[:, -len(tree) :]
    found = []
    with attach(model, config) as oval, torch.no_grad():
        cache = oval.new_cache()
        model(text, cache=cache)
        for accepted in ([0, *tree.path(9)[1:3]], []):
            length = cache.get_seq_length()
            depths = [length + len(tree.path(node)) - 1 for node in range(len(tree))]
            cache.hold([tree.seen()])
            found.append(model(nodes, position_ids=torch.tensor([depths]), cache=cache).logits)
            cache.accept([accepted])
    return torch.cat(found, 1)[0].float()


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3", "phi3"])
@pytest.mark.parametrize("chain", [False, True])
def test_logits_are_as_near_to_float32_as_those_of_torch(
    calls: list[int], name: str, chain: bool
) -> None:
    tree = made_tree(24, chain)
    ids = prompt(70 + len(tree))
    ours, theirs, exact = (
        logits_of(model, {"backend": backend, "linears": "hf", "page_size": 4}, ids, tree)
        for backend, model in (
            ("native", build(name).bfloat16()),
            ("torch", build(name).bfloat16()),
            ("torch", build(name).bfloat16().float()),
        )
    )
    # mistral's window binds from its 13th token on
    assert bool(calls) is (name != "mistral-window")
    check_error(ours, theirs, exact)


def check_error(ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> None:
    mine, other = ((logits - exact).pow(2).mean().sqrt() for logits in (ours, theirs))
    assert 0 < other < 0.1 * exact.std(), "bf16 is no better than noise: nothing is compared"
    assert mine <= 1.2 * other, (mine, other)


def made_tree(count: int, chain: bool) -> RandomTree:
    tree = RandomTree(count, random.Random(0))
    if chain:
        tree.parents = list(range(-1, count - 1))
    return tree


@pytest.mark.smol
@pytest.mark.slow
def test_logits_of_smol() -> None:
    tree, ids = made_tree(32, False), torch.arange(1000, 1300)[None]
    ours, theirs = (
        logits_of(load_model("smol", "bfloat16", "cpu"), {"backend": backend}, ids, tree)
        for backend in ("native", "torch")
    )
    exact = logits_of(load_model("smol", "float32", "cpu"), {"backend": "torch"}, ids, tree)
    check_error(ours, theirs, exact)


@pytest.mark.parametrize("kind", ["right", "mixed"])
def test_texts_in_float32_are_those_of_torch(calls: list[int], kind: str) -> None:
    model, texts = shared("llama"), []
    want = model.generate(prompt(21), max_new_tokens=24, do_sample=False)
    for backend in ("native", "torch"):
        drafter = ScriptedDrafter({0: want[0].tolist()}, kind, VOCAB)
        with attach(model, {"backend": backend}) as oval:
            got = model.generate(
                prompt(21),
                max_new_tokens=24,
                do_sample=False,
                custom_generate=oval.speculative,
                oval_drafter=drafter,
                speculation={"max_nodes": 16, "turns_off": False},
            )
        texts.append(got.tolist())
    assert texts[0] == texts[1] == want.tolist()
    assert not calls, "float32 goes the way of torch"
