"""Dialogues as passages: turns of a file in the model's chat template, the prompt filled up with running text."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from oval_adapters.texts.dialogue import FILLER, render
from oval_adapters.texts.passage import Passage
from oval_adapters.texts.running_text import RunningText, cut_places
from oval_adapters.texts.tokens import encode, encode_with_places
from oval_core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oval_adapters.texts.source import Dialogue

_OPENING = f"Here is a text. We shall talk about other things too.\n\n{FILLER}\n\n"
_SPARE = 64  # joints between turns may take fewer tokens than the turns alone


def chat_passages(
    text: RunningText,
    dialogues: Sequence[Dialogue],
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int,
    steps: int,
    count: int,
    seed: int | None,
    repeat: bool = False,
) -> list[Passage]:
    """Returns dialogues whose prompt ends where the assistant answers; answer and later turns are the continuation.

    The prompt holds as many turns as fit. Running text in the first turn makes it whole.

    Args:
        text: makes up what is missing.
        dialogues: the turns.
        tokenizer: the model's; without a chat template, turns become `User:` and `Assistant:` lines.
        context: tokens of a prompt.
        steps: tokens of a continuation.
        count: passages, starting at different dialogues.
        seed: of the places; None spaces them evenly.
        repeat: repeat turns and text that are too short.

    Raises:
        ConfigError: text or turns too short, a context with no room for the template, or a template that cannot be used.
    """
    text, starts = cut_places(text, context, count, seed, repeat=repeat)
    turns = _Turns(text.name, dialogues, tokenizer, repeat=repeat)
    first = _first_dialogues(len(dialogues), count, seed)
    rows = [
        _written(tokenizer, turns.take(dialogue, context, steps), text.window(s, context), steps)
        for dialogue, s in zip(first, starts, strict=True)
    ]
    return [
        Passage(
            kind="chat",
            name=f"chat/turns {i}",
            prompt_ids=prompt,
            continuation_ids=continuation,
        )
        for i, (prompt, continuation) in enumerate(rows)
    ]


class _Turns:
    """The dialogues of a file as one row of turns, which starts at any of them and goes on at the first."""

    def __init__(
        self,
        name: str,
        dialogues: Sequence[Dialogue],
        tokenizer: PreTrainedTokenizerBase,
        *,
        repeat: bool,
    ) -> None:
        self._name, self._dialogues = name, dialogues
        self._tokenizer, self._repeat = tokenizer, repeat

    def take(self, first: int, context: int, steps: int) -> list[str]:
        """Returns the turns from dialogue `first` on, somewhat more than fill context and steps.

        A turn of more than a quarter of the context is cut: each prompt holds several.
        """
        dialogues, needed = self._dialogues, context + steps + _SPARE
        turns, tokens, taken = [], 0, 0
        while tokens < needed:
            if not dialogues or (taken == len(dialogues) and not self._repeat):
                raise ConfigError(
                    f"data: got {self._name} with turns of {tokens:,} tokens, {needed:,} are needed. Allowed: as "
                    "many or more. Give a longer file, a shorter context, or allow that it is repeated."
                )
            for turn in dialogues[(first + taken) % len(dialogues)]:
                ids, _, ends = encode_with_places(self._tokenizer, turn)
                most = min(len(ids), max(context // 4, 1))
                turns.append(turn[: ends[most - 1]].strip())
                tokens += most
            taken += 1
        return turns


def _first_dialogues(total: int, count: int, seed: int | None) -> list[int]:
    rng = random.Random(seed)
    return [int(total * (i + (0 if seed is None else rng.random())) / count) for i in range(count)]


def _written(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[str], text: RunningText, steps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    context, turns = len(text.ids), [_OPENING + turns[0], *turns[1:]]

    def room_with(answered: int) -> int:
        rendered = render(tokenizer, turns[: 2 * answered + 2], 2 * answered + 1, asked=True)
        return context - sum(
            len(encode(tokenizer, p).ids) for p in (rendered.head, rendered.middle)
        )

    if room_with(0) < 0:
        raise ConfigError(
            f"context: got {context}, in which the chat template has no room. Allowed: {context - room_with(0)} or more. "
            "Raise it."
        )
    # more turns leave less room: as many as fit
    answered = bisect_left(range(1, len(turns) // 2), True, key=lambda n: room_with(n) < 0)
    rendered = render(tokenizer, turns, 2 * answered + 1, asked=True)
    head, middle, rest = (
        encode(tokenizer, part).ids for part in (rendered.head, rendered.middle, rendered.rest)
    )
    filler = text.ids[: context - len(head) - len(middle)]
    return torch.tensor([*head, *filler, *middle]), torch.tensor(rest[:steps])
