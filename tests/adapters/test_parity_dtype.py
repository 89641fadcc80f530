"""bfloat16 on OVAL: where a text leaves that of Hugging Face, the two tokens were nearly tied."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tiny_models import BACKENDS, TINY, build, one_thread, padded, run
from transformers import PreTrainedModel

from oval_adapters import attach

_one_thread = pytest.fixture(autouse=True)(one_thread)

NEAR_TIE = 0.15
"""Logits reach 6 here, where bfloat16 steps are 0.03; three layers add a few of them."""


@functools.cache
def half(name: str) -> PreTrainedModel:
    """A tiny model in bfloat16."""
    return build(name).to(torch.bfloat16)


def check(name: str, lengths: list[int], config: dict[str, Any]) -> None:
    """Compares a run on OVAL with plain Hugging Face up to the first token that differs."""
    model, inputs = half(name), padded(lengths)
    want = run(model, **inputs)
    with attach(model, config) as oval:
        got = run(model, **inputs)
        assert oval.counters.forwards > 0
    width = inputs["input_ids"].shape[1]
    for row in range(len(lengths)):
        ours, theirs = got.sequences[row, width:], want.sequences[row, width:]
        apart = (ours != theirs).nonzero()
        steps = len(theirs) if not len(apart) else int(apart[0]) + 1
        for step in range(steps):  # the first step that differs still had the same text before it
            assert (got.logits[step][row] - want.logits[step][row]).abs().max() < 2 * NEAR_TIE
        if len(apart):
            logits = want.logits[steps - 1][row].float()
            assert logits[theirs[steps - 1]] - logits[ours[steps - 1]] < NEAR_TIE


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TINY)
def test_bfloat16_diverges_only_at_near_ties(name: str, backend: str) -> None:
    check(name, [26, 9], {"backend": backend})


@pytest.mark.parametrize("linears", ["auto", "gemv", "hf"])
@pytest.mark.parametrize("name", TINY)
def test_every_kind_of_linear_layer_diverges_only_at_near_ties(name: str, linears: str) -> None:
    check(name, [26], {"linears": linears})
