"""The prompt of one speculative call: read as plain `generate` reads it, and each row's first token chosen from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel
    from transformers.generation import LogitsProcessorList

    from oval_adapters.hf_cache import OvalCache
    from oval_adapters.speculative.rows import Rows

__all__ = ["ReadPrompt", "emit_first", "read_prompt"]

_AFTER = ("attention_mask", "cache", "inputs_embeds", "logits_to_keep", "position_ids")
"""Inputs of the model that later forwards do not take from `generate`."""


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """What the prompt gave, and how the text goes on.

    Attributes:
        logits: float32 [B, V] of the first new tokens.
        hidden: [B, C] states they were predicted from; None where nobody asked.
        positions: position of each row's first new token.
        inputs: what later forwards of the model get besides.
    """

    logits: torch.Tensor
    hidden: torch.Tensor | None
    positions: Sequence[int]
    inputs: dict[str, Any]


def read_prompt(
    model: PreTrainedModel,
    cache: OvalCache,
    input_ids: torch.Tensor,
    settings: GenerationConfig,
    inputs: dict[str, Any],
) -> ReadPrompt:
    """Runs the model over the prompt [B, L], by whatever way `generate` would: in pieces, with images, as a later turn."""
    output = model._prefill(input_ids, settings, inputs)
    logits = output.logits[:, -1].to(copy=True, dtype=torch.float32, device=input_ids.device)
    hidden = cache.last_hidden[:, -1].clone() if cache.keeps_hidden else None
    positions = inputs.get("position_ids")
    if positions is None:
        following = [seq.length for seq in cache.paged.table.sequences]
    else:
        following = (positions[..., -1] + 1).expand(len(logits)).tolist()
    rest = {name: value for name, value in inputs.items() if name not in _AFTER}
    return ReadPrompt(logits, hidden, following, rest)


def emit_first(
    rows: Rows,
    input_ids: torch.Tensor,
    logits: torch.Tensor,
    processors: LogitsProcessorList,
    *,
    do_sample: bool,
) -> None:
    """Chooses the first token of all rows at once, as plain decoding does: with a seed it draws the same ones."""
    scores = processors(input_ids, logits)
    if do_sample:
        tokens = torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
    else:
        tokens = scores.argmax(dim=-1)
    for row, token in enumerate(tokens.tolist()):
        rows.emit(row, token, scores[row], logits[row])
