"""A model's own greedy answers with the hidden states that made them: written batch by batch, kept, found again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import DynamicCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Answer", "answer_greedily", "answers_of", "read_answers"]

Tick = Callable[[str, int, int], None]
"""Told what was done, how many of how many."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    Attributes:
        prompt: its prompt, int32 [P].
        tokens: the greedy answer, int32 [N], with the end token if it came.
        hidden: last hidden states after the final norm, [N, C]: row i predicts token i.
    """

    prompt: torch.Tensor
    tokens: torch.Tensor
    hidden: torch.Tensor


@torch.no_grad()
def answer_greedily(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    end_ids: Sequence[int],
) -> list[Answer]:
    """Returns the greedy answer to each prompt. Rows that have ended leave the batch.

    Args:
        model: a decoder with `model.model` and `lm_head`, not attached.
        prompts: token ids; decoded together, padded on the left.
        max_new_tokens: at most so many tokens an answer.
        end_ids: tokens that end an answer; kept as its last.
    """
    device, count = model.device, len(prompts)
    width = max(map(len, prompts))
    ids = torch.zeros(count, width, dtype=torch.long)
    mask = torch.zeros(count, width, dtype=torch.long)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :] = torch.tensor(prompt)
        mask[i, width - len(prompt) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    ends = torch.tensor(list(end_ids), device=device)
    rows = torch.arange(count, device=device)
    said: list[list[int]] = [[] for _ in prompts]
    states: list[list[torch.Tensor]] = [[] for _ in prompts]
    cache = DynamicCache(config=model.config)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    head = model.get_output_embeddings()
    for step in range(max_new_tokens):
        hidden = model.base_model(
            input_ids=ids, attention_mask=mask, position_ids=places, cache=cache, use_cache=True
        ).last_hidden_state[:, -1]
        chosen = head(hidden).argmax(-1)
        for row, token, state in zip(rows.tolist(), chosen.tolist(), hidden.cpu(), strict=True):
            said[row].append(token)
            states[row].append(state)
        going = (~torch.isin(chosen, ends)).nonzero()[:, 0]
        if not len(going) or step + 1 == max_new_tokens:
            break
        if len(going) < len(rows):
            cache.batch_select_indices(going)
            rows, chosen, mask, places = rows[going], chosen[going], mask[going], places[going]
        ids = chosen[:, None]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        places = places[:, -1:] + 1
    return [
        Answer(
            torch.tensor(prompt, dtype=torch.int32),
            torch.tensor(tokens, dtype=torch.int32),
            torch.stack(kept),
        )
        for prompt, tokens, kept in zip(prompts, said, states, strict=True)
    ]


def answers_of(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    end_ids: Sequence[int],
    folder: Path,
    batch_size: int,
    tick: Tick,
) -> Iterator[Answer]:
    """Yields the answer to each prompt; those in the folder are read back, the rest is written there.

    Prompts are answered in the order of their length, so a batch carries little padding.

    Args:
        model: see `answer_greedily`.
        prompts: token ids.
        max_new_tokens: at most so many tokens an answer.
        end_ids: tokens that end an answer.
        folder: one file a batch.
        batch_size: prompts a batch.
        tick: called after each batch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ordered = sorted((tuple(p) for p in prompts), key=lambda prompt: (len(prompt), prompt))
    batches = [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]
    done = 0
    for batch in batches:
        facts = json.dumps([str(model.dtype), model.config.to_dict().get("_name_or_path"), batch,
                            max_new_tokens, list(end_ids)])  # fmt: skip
        path = folder / f"{hashlib.sha256(facts.encode()).hexdigest()[:24]}.safetensors"
        if not path.is_file():
            _save(path, answer_greedily(model, batch, max_new_tokens, end_ids))
        yield from read_answers(path)
        done += len(batch)
        tick("answers", done, len(ordered))


def _save(path: Path, answers: Sequence[Answer]) -> None:
    partial = path.with_suffix(".partial")
    save_file(
        {
            "prompts": torch.cat([a.prompt for a in answers]),
            "prompt_lengths": torch.tensor([len(a.prompt) for a in answers]),
            "tokens": torch.cat([a.tokens for a in answers]),
            "lengths": torch.tensor([len(a.tokens) for a in answers]),
            "hidden": torch.cat([a.hidden for a in answers]),
        },
        partial,
    )
    partial.replace(path)  # a file that is there is whole


def read_answers(path: Path) -> Iterator[Answer]:
    """Yields the answers of one file that `answers_of` wrote; its hidden states are in the model's dtype."""
    with safe_open(path, "pt") as file:
        parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    lengths, prompt_lengths = parts["lengths"].tolist(), parts["prompt_lengths"].tolist()
    yield from map(
        Answer,
        parts["prompts"].split(prompt_lengths),
        parts["tokens"].split(lengths),
        parts["hidden"].split(lengths),
    )
