"""Whatever is put together (drafts, pages, policies, tiers, processors, turns), the text is that of plain Hugging Face."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from generate_scenarios import MANY_EOS
from reference_speculative import ScriptedDrafter
from tiny_models import VOCAB, one_thread, padded, prompt, shared

from oval_adapters import attach

_one_thread = pytest.fixture(autouse=True)(one_thread)

READS_ALL: dict[str, dict[str, Any]] = {
    "full": {},
    "routed": {"policy": "routed", "routing": {"budget_share": 1.0, "dense_layers": [0]}},
    "guarded": {"policy": "guarded", "routing": {"coverage": 1.0, "dense_layers": [2]}},
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.6},
    "ngrams": {"no_repeat_ngram_size": 2},
    "bias": {"sequence_bias": {(9,): 3.0, (11, 12): 5.0, (20,): -4.0}},
    "suppressed": {"suppress_tokens": [30, 31], "begin_suppress_tokens": list(range(40, 80))},
    "forced end": {"forced_eos_token_id": 3},
    "end wanted": {"exponential_decay_length_penalty": (4, 1.1), "eos_token_id": MANY_EOS},
    "watermark": {"watermarking_config": {"bias": 2.5, "seeding_scheme": "lefthash"}},
    "allowed": {"prefix_allowed_tokens_fn": lambda row, ids: range(5 + row, VOCAB - int(ids[-1]) % 7)},
}  # fmt: skip


def mixed(chance: random.Random, folder: Path) -> tuple[dict[str, Any], dict[str, Any], str]:
    """A configuration, what `generate` is told, and who drafts."""
    config = {"page_size": chance.choice([1, 4, 5, 16]), **READS_ALL[chance.choice([*READS_ALL])]}
    if chance.random() < 0.5:
        tiers: dict[str, Any] = {"fast_tokens": 96, "sink_tokens": 4, "recent_tokens": 16}
        if chance.random() < 0.5:
            tiers |= {"disk": str(folder), "host_tokens": 48}
        config |= {"page_size": chance.choice([1, 2, 4]), "tiers": tiers}
    rows = chance.choice([1, 2, 4])
    text = padded([chance.randint(1, 30) for _ in range(rows)], chance.randint(1, 9))
    call = {**text, "max_new_tokens": chance.choice([1, 2, 9, 20]), "do_sample": False}
    for name in chance.sample([*PROCESSORS], 2):
        call |= PROCESSORS[name]
    if chance.random() < 0.3:
        call["prefill_chunk_size"] = 7
    return config, call, chance.choice(["tree", "late", "tree", "ngram", "self"])


def longer(call: dict[str, Any], texts: torch.Tensor, chance: random.Random) -> dict[str, Any]:
    """The same call with a second turn."""
    more = prompt(chance.randint(1, 9), len(texts), 4)
    ids = torch.cat([texts, more], 1)
    mask = call["attention_mask"]
    ones = mask.new_ones(len(mask), ids.shape[1] - mask.shape[1])
    return {**call, "input_ids": ids, "attention_mask": torch.cat([mask, ones], 1)}


@pytest.mark.parametrize("seed", range(16))
def test_no_mixture_changes_a_token(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    model = shared(chance.choice(["llama", "qwen3"]))
    config, call, kind = mixed(chance, tmp_path)
    with attach(model, config) as oval:
        cache = oval.new_cache()
        for turn in range(2):
            want = model.generate(**call, use_oval=False)
            starts = (call["attention_mask"] == 0).sum(1).tolist()
            texts = {row: want[row, start:].tolist() for row, start in enumerate(starts)}
            extra: dict[str, Any] = {
                "speculation": {"turns_off": False, "max_nodes": chance.choice([3, 12])}
            }
            if kind in ("ngram", "self"):
                extra["speculation"] |= {"drafter": kind, "ngram_min": 1}
            else:
                extra["oval_drafter"] = ScriptedDrafter(texts, kind, VOCAB, needs_hidden=turn == 1)
            got = model.generate(**call, **extra, cache=cache, custom_generate=oval.speculative)
            assert got.tolist() == want.tolist(), (turn, config, kind)
            if (
                "eos_token_id" in call
            ):  # rows that ended hold fewer tokens: the next turn is a text of its own
                break
            if chance.random() < 0.5:
                cache.crop(-min(3, cache.get_seq_length() - 1))
            call = longer(call, want, chance)
        cache.close()
