"""Assisted decoding on OVAL: drafts are rejected by cropping the cache, and texts stay those of Hugging Face."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from tiny_models import TINY, assert_same_run, one_thread, prompt, run, shared

from oval_adapters import attach

_one_thread = pytest.fixture(autouse=True)(one_thread)

ASSISTANTS = {"agrees": 0, "disagrees": 5}
"""Seed of the draft model's weights: the target's own, or others, whose drafts are mostly rejected."""


def assisted(name: str, assistant: Any, **extra: Any) -> Any:
    """One assisted run; the draft length must not depend on earlier runs."""
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    return run(shared(name), prompt(20), assistant_model=assistant, max_new_tokens=24, **extra)


@pytest.mark.parametrize("attach_assistant", [True, False])
@pytest.mark.parametrize("kind", ASSISTANTS)
@pytest.mark.parametrize("name", [name for name in TINY if name != "llava"])
def test_an_assistant_model_equals_hugging_face(
    name: str, kind: str, attach_assistant: bool
) -> None:
    model = shared(name)
    assistant = shared(name if kind == "agrees" else "llama", ASSISTANTS[kind])
    if assistant is model:
        assistant = shared(name, 1000)
        assistant.load_state_dict(model.state_dict())
    want = assisted(name, assistant)
    with contextlib.ExitStack() as stack:
        oval = stack.enter_context(attach(model))
        draft = stack.enter_context(attach(assistant)) if attach_assistant else None
        got = assisted(name, assistant)
        assert oval.counters.forwards > 0
        assert draft is None or draft.counters.forwards > 0
        if kind == "disagrees":
            assert oval.counters.tokens_dropped > 0, "no draft was rejected"
    assert_same_run(got, want)


def test_only_the_assistant_attached_equals_hugging_face() -> None:
    assistant = shared("qwen2", 5)
    want = assisted("llama", assistant)
    with attach(assistant) as draft:
        assert_same_run(assisted("llama", assistant), want)
        assert draft.counters.forwards > 0


def test_assisted_sampling_equals_hugging_face() -> None:
    model, assistant = shared("llama"), shared("llama", 5)
    want = assisted("llama", assistant, do_sample=True)
    with attach(model), attach(assistant):
        assert_same_run(assisted("llama", assistant, do_sample=True), want)


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_early_exit_of_the_model_itself_equals_hugging_face(name: str) -> None:
    model = shared(name)
    want = run(model, prompt(20), assistant_early_exit=2)
    with attach(model):
        assert_same_run(run(model, prompt(20), assistant_early_exit=2), want)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_lookup_on_the_cache_of_an_earlier_turn_equals_hugging_face(name: str) -> None:
    model = shared(name)

    def two_turns() -> Any:
        first = run(model, prompt(20))
        ids = torch.cat([first.sequences, prompt(8, seed=1).repeat(1, 2)], 1)
        return run(model, ids, cache=first.cache, prompt_lookup_num_tokens=3)

    want = two_turns()
    with attach(model):
        assert_same_run(two_turns(), want)
