"""A cache outlives its turn: later turns, copies, and going on without OVAL equal plain Hugging Face."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import (
    BACKENDS,
    TINY,
    WINDOW,
    assert_same_run,
    one_thread,
    padded,
    prompt,
    run,
    shared,
)
from transformers import PreTrainedModel

from oval_adapters import Attachment, OvalCache, attach

_one_thread = pytest.fixture(autouse=True)(one_thread)


def later_turn(model: PreTrainedModel, first: Any, more: torch.Tensor, **extra: Any) -> Any:
    """Goes on after a result of `run` with more tokens, on the same cache."""
    return run(model, torch.cat([first.sequences, more], 1), cache=first.cache, **extra)


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("name", TINY)
def test_a_later_turn_equals_hugging_face(name: str, turns: int) -> None:
    model = shared(name)

    def talk() -> list[Any]:
        results = [run(model, prompt(9))]
        for turn in range(turns):
            results.append(later_turn(model, results[-1], prompt(5, seed=turn + 2)))
        return results

    want = talk()
    with attach(model):
        got = talk()
    for ours, theirs in zip(got, want, strict=True):
        assert_same_run(ours, theirs)


def padded_talk(model: PreTrainedModel, second: list[int]) -> tuple[Any, Any]:
    """Two turns of a batch, each padded on the left by itself: padding lies in the middle of the text."""
    batch, more = padded([13, 6, 9]), padded(second, seed=5)
    first = run(model, **batch, max_new_tokens=6)
    made = first.sequences.shape[1] - batch["input_ids"].shape[1]
    mask = [batch["attention_mask"], torch.ones(3, made, dtype=torch.long), more["attention_mask"]]
    ids = torch.cat([first.sequences, more["input_ids"]], 1)
    return first, run(model, ids, attention_mask=torch.cat(mask, 1), cache=first.cache)


@pytest.mark.parametrize("name", TINY)
def test_a_later_turn_of_a_padded_batch_equals_hugging_face(name: str) -> None:
    model = shared(name)
    want = padded_talk(model, [4, 4, 4])
    with attach(model):
        got = padded_talk(model, [4, 4, 4])
    for ours, theirs in zip(got, want, strict=True):
        assert_same_run(ours, theirs)


@pytest.mark.parametrize("name", TINY)
def test_padding_in_the_middle_equals_hugging_face(name: str) -> None:
    model = shared(name)
    want = padded_talk(model, [3, 8, 1])
    with attach(model):
        got = padded_talk(model, [3, 8, 1])
    for ours, theirs in zip(got, want, strict=True):
        assert_same_run(ours, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_reads_a_row_with_padding_in_the_middle(backend: str) -> None:
    model = shared("llama")
    want = padded_talk(model, [3, 8, 1])
    with attach(model, {"backend": backend}):
        for ours, theirs in zip(padded_talk(model, [3, 8, 1]), want, strict=True):
            assert_same_run(ours, theirs)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_beams_on_the_cache_of_an_earlier_turn_equal_hugging_face(name: str) -> None:
    model = shared(name)

    def talk() -> Any:
        beams = run(model, prompt(9), num_beams=3, num_return_sequences=3)
        return later_turn(model, beams, prompt(4, 3), do_sample=True)

    want = talk()
    with attach(model):
        assert_same_run(talk(), want)


def filled(oval: Attachment, model: PreTrainedModel, **inputs: Any) -> OvalCache:
    """An OVAL cache after a forward with these inputs, at the positions that `generate` gives."""
    cache = oval.new_cache()
    if "attention_mask" in inputs:
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        model(**inputs, cache=cache)
    return cache


@pytest.mark.parametrize("name", TINY)
def test_a_copy_of_a_prefix_serves_several_texts(name: str) -> None:
    model, prefix = shared(name), prompt(2 * WINDOW)
    texts = [torch.cat([prefix, prompt(3 + i, seed=i)], 1) for i in range(2)]
    want = [run(model, text) for text in texts]
    with attach(model) as oval:
        cache = filled(oval, model, input_ids=prefix)
        for text, result in zip(texts, want, strict=True):
            assert_same_run(run(model, text, cache=copy.deepcopy(cache)), result)
        assert cache.get_seq_length() == 2 * WINDOW
        cache.paged.table.check_integrity()


def test_a_copy_of_a_padded_prefix_keeps_its_padding() -> None:
    model, batch = shared("llama"), padded([12, 5])
    ids = torch.cat([batch["input_ids"], prompt(3, 2, seed=8)], 1)
    mask = torch.cat([batch["attention_mask"], torch.ones(2, 3, dtype=torch.long)], 1)
    want = run(model, ids, attention_mask=mask)
    with attach(model) as oval:
        cache = filled(oval, model, **batch)
        first = run(model, ids, attention_mask=mask, cache=copy.deepcopy(cache))
        second = run(model, ids, attention_mask=mask, cache=cache)
    assert_same_run(first, want)
    assert_same_run(second, want)


@pytest.mark.parametrize("name", TINY)
def test_a_text_goes_on_without_oval(name: str) -> None:
    model = shared(name)
    first = run(model, prompt(9))
    want = later_turn(model, first, prompt(4, seed=3))
    with attach(model):
        ours = run(model, prompt(9))
        ours.cache = ours.cache.to_dynamic_cache()
    assert_same_run(later_turn(model, ours, prompt(4, seed=3)), want)


@pytest.mark.parametrize("name", TINY)
def test_a_padded_batch_goes_on_without_oval(name: str) -> None:
    model = shared(name)
    batch = padded([15, 6])
    ids = torch.cat([batch["input_ids"], prompt(3, 2, seed=8)], 1)
    mask = torch.cat([batch["attention_mask"], torch.ones(2, 3, dtype=torch.long)], 1)
    want = run(model, ids, attention_mask=mask)
    with attach(model) as oval:
        dynamic = filled(oval, model, **batch).to_dynamic_cache()
    assert_same_run(run(model, ids, attention_mask=mask, cache=dynamic), want)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_cache_made_in_inference_mode_is_filled_outside_of_it(name: str) -> None:
    model, ids = shared(name), prompt(30)
    with torch.no_grad():
        want = model(ids).logits
    with attach(model) as oval:
        cache = oval.new_cache()
        with torch.inference_mode():
            parts = [model(ids[:, :9], cache=cache).logits]
        with torch.no_grad():
            parts.append(model(ids[:, 9:21], cache=cache).logits)
        with torch.inference_mode():
            parts.append(model(ids[:, 21:], cache=cache).logits)
    assert (torch.cat(parts, 1) - want).abs().max() < 1e-4
