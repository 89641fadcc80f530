"""Prompts as token ids, and the units they are decoded in: prompts of one category, so that totals can be told apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from oval_adapters.distill.prompts import chat_prompt
from oval_adapters.evaluation.prompt_files import EvalPrompt
from oval_core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

__all__ = ["Skipped", "Unit", "make_units", "stamp_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Prompts that are decoded together.

    Attributes:
        number: its place in the run.
        category: of all of them.
        names: of each.
        prompts: token ids of each.
    """

    number: int
    category: str
    names: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]

    def inputs(self, pad_token_id: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Returns `input_ids` and `attention_mask` [B, T], padded on the left."""
        width = max(map(len, self.prompts))
        ids = torch.full((len(self.prompts), width), pad_token_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(self.prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """A prompt that the model has no positions for.

    Attributes:
        name: of the prompt.
        category: of the prompt.
        prompt_tokens: its length.
    """

    name: str
    category: str
    prompt_tokens: int


def make_units(
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainedConfig,
    prompts: Sequence[EvalPrompt],
    max_new_tokens: int,
    batch_size: int,
) -> tuple[list[Unit], list[Skipped]]:
    """Puts prompts in the chat template, if there is one, and into units.

    Raises:
        ConfigError: no prompt leaves room for `max_new_tokens`, or one becomes no token.
    """
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    fitting: list[tuple[EvalPrompt, tuple[int, ...]]] = []
    skipped = []
    for prompt in prompts:
        ids = _encode(tokenizer, prompt)
        if limit is not None and len(ids) + max_new_tokens > limit:
            skipped.append(Skipped(name=prompt.name, category=prompt.category, prompt_tokens=len(ids)))  # fmt: skip
        else:
            fitting.append((prompt, ids))
    if not fitting:
        shortest = min(skip.prompt_tokens for skip in skipped)
        raise ConfigError(
            f"prompts: got {len(skipped)}, the shortest of {shortest} tokens, with {max_new_tokens} new tokens each. "
            f"Allowed: {limit} together, the positions of this model. Lower --max-new-tokens, or give shorter prompts."
        )
    places = _first_places(prompts)
    fitting.sort(key=lambda pair: places[pair[0].category])  # stable: prompts keep their order
    units: list[Unit] = []
    for category, group in groupby(fitting, key=lambda pair: pair[0].category):
        own = list(group)
        for start in range(0, len(own), batch_size):
            part = own[start : start + batch_size]
            names = tuple(prompt.name for prompt, _ in part)
            ids = tuple(encoded for _, encoded in part)
            units.append(Unit(number=len(units), category=category, names=names, prompts=ids))
    return units, skipped


def stamp_of(settings: dict[str, Any], units: Sequence[Unit]) -> str:
    """Returns a name for what a run measures: a run that goes on must have the same."""
    facts = json.dumps([settings, [[unit.names, unit.prompts] for unit in units]], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:24]


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: EvalPrompt) -> tuple[int, ...]:
    ids = chat_prompt(tokenizer, prompt.text)
    if not ids:
        raise ConfigError(
            f"prompts: {prompt.name}: the tokenizer made no token of it. Allowed: any text. Change it."
        )
    return tuple(ids)


def _first_places(prompts: Sequence[EvalPrompt]) -> dict[str, int]:
    """By category: where it comes first."""
    places: dict[str, int] = {}
    for place, prompt in enumerate(prompts):
        places.setdefault(prompt.category, place)
    return places
