"""Prompts that a chat model writes when it is given only the header of a user's turn (the idea of Magpie, 2406.08464)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

from oval_core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["chat_header", "chat_prompt", "write_prompts"]

_MARK = "\u2060OVAL\u2060"


def chat_header(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns what the template puts before the user's words.

    Raises:
        ConfigError: no chat template, or one that does not keep the words.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            "data: got 'self', and this tokenizer has no chat template, so its model writes no prompts. "
            "Allowed: --data FILE with one prompt a line, or a chat model."
        )
    text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    before, mark, _ = str(text).partition(_MARK)
    if not mark:
        raise ConfigError(
            "data: got 'self', and the chat template changes the user's words. Allowed: --data FILE."
        )
    return before


def chat_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Returns the token ids of a user's words in the chat template, up to where the answer begins.

    Without a template the words stand alone.
    """
    if not tokenizer.chat_template:
        return list(tokenizer(text).input_ids)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(rendered, add_special_tokens=False).input_ids)


@torch.no_grad()
def write_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    seed: int,
    *,
    opening: str = "",
    max_tokens: int = 60,
    top_p: float = 0.95,
    temperature: float = 1.0,
) -> list[str]:
    """Returns user turns that the model samples after the header alone; fewer than `count` where some are unfit.

    Args:
        model: not attached.
        tokenizer: with a chat template.
        count: turns to sample at once.
        seed: of the sampling.
        opening: words that every turn begins with; they are no part of `max_tokens`.
        max_tokens: turns that do not end by then are cut there.
        top_p: nucleus of the sampling.
        temperature: of the sampling.
    """
    header = tokenizer(chat_header(tokenizer) + opening, add_special_tokens=False).input_ids
    ends = torch.tensor([tokenizer.eos_token_id])
    draw = torch.Generator().manual_seed(seed)
    ids = torch.tensor([header], device=model.device).repeat(count, 1)
    cache = DynamicCache(config=model.config)
    head, written = model.get_output_embeddings(), []
    for _ in range(max_tokens):
        hidden = model.base_model(input_ids=ids, cache=cache, use_cache=True).last_hidden_state
        shares = torch.softmax(head(hidden[:, -1]).float().cpu() / temperature, -1)
        ranked, order = shares.sort(-1, descending=True)
        ranked[ranked.cumsum(-1) - ranked > top_p] = 0
        ids = order.gather(1, torch.multinomial(ranked, 1, generator=draw)).to(model.device)
        written.append(ids[:, 0].cpu())
    turns = []
    for row in torch.stack(written, 1):
        end = torch.isin(row, ends).nonzero()
        text = opening + tokenizer.decode(
            row[: int(end[0, 0])] if len(end) else row, skip_special_tokens=True
        )
        if 15 < len(text.strip()) < 400:
            turns.append(text.strip())
    return turns
