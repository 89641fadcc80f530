"""Speculative decoding gives the tokens of plain decoding, whatever was drafted, and ends where it ends."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from generate_scenarios import LENGTHS, MANY_EOS, StopAt
from reference_speculative import ScriptedDrafter
from tiny_models import VOCAB, one_thread, padded, prompt, shared
from transformers import PreTrainedModel, StoppingCriteria

from oval_adapters import attach

_one_thread = pytest.fixture(autouse=True)(one_thread)

OUTPUT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


def plain(model: PreTrainedModel, **call: Any) -> Any:
    """Plain Hugging Face."""
    torch.manual_seed(7)
    return model.generate(**{"max_new_tokens": 24, "do_sample": False, **OUTPUT, **call})


def texts_of(output: Any, call: dict[str, Any]) -> dict[int, list[int]]:
    """What each row is going to be, without the padding on the left."""
    ids = output.sequences
    mask = call.get("attention_mask")
    starts = [0] * len(ids)
    if mask is not None:
        per_row = len(ids) // len(mask)
        starts = [int((mask[row // per_row] == 0).sum()) for row in range(len(ids))]
    return {row: ids[row, start:].tolist() for row, start in enumerate(starts)}


def speculate(
    model: PreTrainedModel, want: Any, kind: str, config: Any = None, **call: Any
) -> tuple[Any, ScriptedDrafter, dict[str, Any]]:
    """The same call on OVAL, with a drafter that knows the text."""
    drafter = ScriptedDrafter(texts_of(want, call), kind, VOCAB)
    with attach(model, config) as oval:
        torch.manual_seed(7)
        got = model.generate(
            **{"max_new_tokens": 24, "do_sample": False, **OUTPUT, **call},
            custom_generate=oval.speculative,
            oval_drafter=drafter,
            speculation={"max_nodes": 16, "turns_off": False},
        )
        stats = oval.stats()["speculation"]
    return got, drafter, stats


def assert_same(got: Any, want: Any, ends: Sequence[int] | None = None) -> None:
    """Same tokens; scores and logits within 1e-4 as long as a row runs."""
    assert got.sequences.tolist() == want.sequences.tolist()
    for name in ("scores", "logits"):
        ours, theirs = getattr(got, name), getattr(want, name)
        assert len(ours) == len(theirs)
        for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            for row in range(len(mine)):
                if ends is None or step < ends[row]:
                    torch.testing.assert_close(mine[row], other[row], atol=1e-4, rtol=1e-4)
    assert got.cache.get_seq_length() == want.cache.get_seq_length()


@functools.cache
def plain_text(name: str) -> Any:
    """Plain Hugging Face on one prompt, once for all drafters."""
    return plain(shared(name), inputs=prompt(21))


@functools.cache
def plain_call(case: str) -> Any:
    """Plain Hugging Face on one of `CALLS`, once for all drafters."""
    return plain(shared("llama"), **CALLS[case])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("llama", kind) for kind in ("right", "wrong", "late", "tree")),
        *((name, "tree") for name in ("mistral-window", "qwen2", "gemma2", "gemma3")),
    ],
)
def test_tokens_are_those_of_plain_decoding(name: str, kind: str) -> None:
    model, call = shared(name), {"inputs": prompt(21)}
    want = plain_text(name)
    got, drafter, stats = speculate(model, want, kind, **call)
    assert_same(got, want)
    emitted = want.sequences.shape[1] - 21 - 1  # the first is the prompt's
    assert stats["emitted"] == emitted
    if kind == "right":
        assert stats["steps"] == 5, "23 tokens, 5 a step"
    if kind == "wrong":
        assert stats["steps"] == emitted
        assert stats["accepted"] == 0
    assert len(drafter.requests) == stats["steps"]


@pytest.mark.parametrize("name", ["mistral-window", "gemma2", "phi3-window"])
def test_windows_count_columns_in_ragged_batches(name: str) -> None:
    model, call = shared(name), padded(LENGTHS)
    want = plain(model, **call)
    got, _, stats = speculate(model, want, "tree", **call)
    assert_same(got, want)
    assert stats["accepted"] > 0


class StopByScores(StoppingCriteria):
    """Ends a text by the scores so far, which must be as many as its new tokens."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Returns a verdict for each row."""
        assert len(scores) == input_ids.shape[1] - 14
        assert scores[-1].shape == (len(input_ids), VOCAB)
        return (scores[-1].amax(1) > 0) & torch.tensor(len(scores) >= 7)


CALLS: dict[str, dict[str, Any]] = {
    "repetition": {"inputs": prompt(14), "repetition_penalty": 1.7},
    "ngrams": {"inputs": prompt(6).repeat(1, 2), "no_repeat_ngram_size": 2},
    "bad-words": {"inputs": prompt(14), "bad_words_ids": [[7], [9, 11], [40]]},
    "min-new": {"inputs": prompt(14), "min_new_tokens": 15, "eos_token_id": MANY_EOS},
    "eos": {"inputs": prompt(14), "eos_token_id": MANY_EOS},
    "custom": {"inputs": prompt(14), "stopping_criteria": [StopAt(20)]},
    "by-scores": {"inputs": prompt(14), "stopping_criteria": [StopByScores()]},
    "max-time": {"inputs": prompt(14), "max_time": 1e-9},
    "chunked": {"inputs": prompt(37), "prefill_chunk_size": 8},
    "max-length": {"inputs": prompt(14), "max_length": 18, "max_new_tokens": None},
    "one": {"inputs": prompt(14), "max_new_tokens": 1},
    "two": {"inputs": prompt(14), "max_new_tokens": 2},
    "batch": padded(LENGTHS),
    "batch-eos": {**padded(LENGTHS), "eos_token_id": MANY_EOS},
    "batch-custom": {**padded([9, 15]), "stopping_criteria": [StopAt(18)]},
    "batch-processors": {
        **padded([11, 17]),
        "repetition_penalty": 1.6,
        "no_repeat_ngram_size": 2,
        "encoder_repetition_penalty": 1.2,
        "encoder_no_repeat_ngram_size": 3,
        "bad_words_ids": [[7], [9, 11]],
        "min_new_tokens": 6,
        "eos_token_id": MANY_EOS,
        "prefix_allowed_tokens_fn": lambda row, ids: list(range(5 + row, VOCAB - row)),
    },
}


def ends_of(want: Any, call: dict[str, Any], columns: int) -> list[int] | None:
    """How many new tokens each row has before padding begins; None where no row is padded."""
    stops = call.get("eos_token_id")
    if stops is None:
        return None
    new = want.sequences[:, columns:].tolist()
    return [next((i + 1 for i, t in enumerate(r) if t in stops), len(r)) for r in new]


@pytest.mark.parametrize("kind", ["right", "tree"])
@pytest.mark.parametrize("case", CALLS)
def test_settings_of_generate_act_within_an_accepted_run(case: str, kind: str) -> None:
    model, call, want = shared("llama"), CALLS[case], plain_call(case)
    got, _, stats = speculate(model, want, kind, **call)
    columns = call.get("inputs", call.get("input_ids")).shape[1]
    assert_same(got, want, ends_of(want, call, columns))
    if kind == "right" and case not in ("one", "two", "max-time"):
        assert stats["accepted"] > 0
