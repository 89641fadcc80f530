"""Running text as tokens: where its sentences end, and passages cut from it at places spread over the whole."""

from __future__ import annotations

import random
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from oval_adapters.texts.passage import Passage
from oval_adapters.texts.tokens import encode_with_places, start_ids
from oval_core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NEAR = 64  # tokens that a place may move to reach the end of a sentence


@dataclass(frozen=True, slots=True)
class RunningText:
    """A text as tokens.

    Attributes:
        name: for messages.
        ids: its tokens.
        ends: places after the last token of a sentence, ascending.
    """

    name: str
    ids: list[int]
    ends: list[int]

    def window(self, start: int, length: int) -> RunningText:
        """Returns `length` tokens from `start` on."""
        first, last = bisect_left(self.ends, start), bisect_left(self.ends, start + length)
        ends = [end - start for end in self.ends[first:last]]
        return RunningText(self.name, self.ids[start : start + length], ends)

    def sentence_end(self, place: int, limit: int) -> int:
        """Returns the end of a sentence nearest to `place`, at most `limit`; `place` itself if none is near."""
        at = bisect_left(self.ends, place)
        near = [e for e in self.ends[max(at - 1, 0) : at + 1] if e <= limit]
        best = min(near, key=lambda end: abs(end - place), default=place)
        return best if abs(best - place) <= _NEAR else place


def tokenize(tokenizer: PreTrainedTokenizerBase, name: str, text: str) -> RunningText:
    """Returns the text as tokens; reads all of it, about a second a megabyte.

    Raises:
        ConfigError: the tokenizer cannot tell which characters a token stands for.
    """
    ids, starts, lasts = encode_with_places(tokenizer, text)
    ends = []
    for place, (last, following) in enumerate(zip(lasts, starts[1:], strict=False), start=1):
        mark = text[last - 1 : last] if last else ""
        # the space before a word is part of the word's token, or a token of its own, or part of none
        spaced = following > last or text[last : last + 1].isspace()
        if mark == "\n" or (mark in (".", "!", "?") and spaced):
            ends.append(place)
    return RunningText(name, ids, ends)


def cut_places(
    text: RunningText, length: int, count: int, seed: int | None, *, repeat: bool
) -> tuple[RunningText, list[int]]:
    """Returns the text, repeated if need be, and `count` starts of `length` tokens in it.

    Args:
        text: to cut from.
        length: tokens of a cut.
        count: cuts; they overlap where the text is short.
        seed: each cut starts anywhere in its own part of `count` equal parts; None spaces them evenly.
        repeat: repeat a text that is too short.

    Raises:
        ConfigError: the text is too short and may not be repeated.
    """
    if len(text.ids) < length:
        if not repeat or not text.ids:
            raise ConfigError(
                f"data: got {text.name} with {len(text.ids):,} tokens, {length:,} are needed. Allowed: as many or more. "
                "Give a longer text, a shorter context, or allow that it is repeated."
            )
        text = _repeated(text, -(-length // len(text.ids)))
    room = len(text.ids) - length
    if seed is None:
        return text, [room * i // max(count - 1, 1) for i in range(count)]
    rng = random.Random(seed)
    return text, [int(room * (i + rng.random()) / count) for i in range(count)]


def text_passages(
    text: RunningText,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int,
    steps: int,
    count: int,
    seed: int | None,
    repeat: bool = False,
) -> list[Passage]:
    """Returns passages of running text: `context` tokens and the `steps` tokens that follow them.

    Args:
        text: to cut from.
        tokenizer: the model's, the one that made the tokens.
        context: tokens of a prompt, those included that the tokenizer puts before every text.
        steps: tokens of a continuation.
        count: passages.
        seed: of the places; None spaces them evenly.
        repeat: repeat a text that is too short.

    Raises:
        ConfigError: the text is too short.
    """
    before = start_ids(tokenizer)
    length = context - len(before) + steps
    text, starts = cut_places(text, length, count, seed, repeat=repeat)
    rows = [torch.tensor([*before, *text.ids[s : s + length]]) for s in starts]
    return [
        Passage(
            kind="text",
            name=f"text/running {i}",
            prompt_ids=row[:context].clone(),
            continuation_ids=row[context:].clone(),
        )
        for i, row in enumerate(rows)
    ]


def _repeated(text: RunningText, times: int) -> RunningText:
    length = len(text.ids)
    ends = [end + length * i for i in range(times) for end in text.ends]
    return RunningText(text.name, text.ids * times, ends)
