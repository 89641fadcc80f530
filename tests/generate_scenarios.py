"""Ways to call `generate`, each run on OVAL and on plain Hugging Face and compared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from tiny_models import WINDOW, assert_same_run, padded, prompt, run, shared
from transformers import PreTrainedModel, StoppingCriteria

from oval_adapters import attach

MANY_EOS = list(range(5, 25))
"""So many ends of text that rows of a batch end at different steps."""

LENGTHS = [30, 5, 12, 19]
"""Prompts around the window, longest first; three of them are padded."""


class StopAt(StoppingCriteria):
    """Ends each row where its text has reached some length and an even token."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Returns a verdict for each row."""
        return (input_ids[:, -1] % 2 == 0) & (input_ids.shape[1] >= self.length)


def embeds(model: PreTrainedModel) -> dict[str, Any]:
    """Two padded prompts as embeddings."""
    batch = padded([18, 11])
    return {
        "inputs_embeds": model.get_input_embeddings()(batch["input_ids"]).detach(),
        "attention_mask": batch["attention_mask"],
    }


def repeated(model: PreTrainedModel) -> dict[str, Any]:
    """A text that repeats itself, so that looking up drafts finds some."""
    return {"inputs": prompt(9).repeat(1, 3), "prompt_lookup_num_tokens": 4, "max_new_tokens": 20}


Scenario = Callable[[PreTrainedModel], dict[str, Any]]

CORE: dict[str, Scenario] = {
    "crosses-window": lambda m: {"inputs": prompt(WINDOW - 5), "max_new_tokens": 16},
    "beyond-window": lambda m: {"inputs": prompt(3 * WINDOW)},
    "padded-batch": lambda m: {**padded(LENGTHS), "max_new_tokens": 16},
    "chunked-padded": lambda m: {**padded(LENGTHS), "prefill_chunk_size": 7},
    "beams-padded": lambda m: {
        **padded([14, 20]),
        "num_beams": 4,
        "num_return_sequences": 3,
        "early_stopping": True,
        "eos_token_id": MANY_EOS,
    },
}
"""Run on every backend."""

MORE: dict[str, Scenario] = {
    "one-token": lambda m: {"inputs": prompt(1), "max_new_tokens": 18},
    "chunked": lambda m: {"inputs": prompt(37), "prefill_chunk_size": 8, "max_new_tokens": 5},
    "sampling": lambda m: {"inputs": prompt(20), "do_sample": True, "top_k": 0},
    "sampling-many": lambda m: {
        **padded([9, 15]),
        "do_sample": True,
        "top_p": 0.9,
        "num_return_sequences": 3,
    },
    "beams": lambda m: {"inputs": prompt(20), "num_beams": 4, "num_return_sequences": 3},
    "beams-sampling": lambda m: {**padded([9, 15]), "num_beams": 3, "do_sample": True},
    "uneven-ends": lambda m: {**padded(LENGTHS), "eos_token_id": MANY_EOS},
    "processors": lambda m: {
        **padded([11, 17]),
        "repetition_penalty": 1.6,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[7], [9, 11]],
        "min_new_tokens": 6,
        "eos_token_id": MANY_EOS,
    },
    "stopping": lambda m: {**padded([9, 15]), "stopping_criteria": [StopAt(18)]},
    "guidance": lambda m: {"inputs": prompt(20), "guidance_scale": 1.7, "max_new_tokens": 6},
    "embeddings": embeds,
    "lookup": repeated,
}
"""Run on one backend: what they exercise is above the attention."""


@functools.cache
def plain(name: str, scenario: str) -> Any:
    """The result of plain Hugging Face, once for all backends."""
    model = shared(name)
    return run(model, **({**CORE, **MORE}[scenario](model)))


def check(name: str, scenario: str, config: dict[str, Any]) -> dict[str, Any]:
    """Compares a run on OVAL with plain Hugging Face; returns what the attachment says of it."""
    model = shared(name)
    want = plain(name, scenario)
    with attach(model, config) as oval:
        got = run(model, **({**CORE, **MORE}[scenario](model)))
        assert_same_run(got, want)
        del got  # its cache ends here, and what waits in it counts as wasted
        stats = oval.stats()
    assert stats["forwards"] > 0, "the run did not use OVAL"
    return stats
