"""Judges retrieval by answers: codes hidden in running text, questions about them, and the grade. Runs no model."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from oval_adapters.texts.facts import MOST_FACTS, Fact, passkeys
from oval_adapters.texts.passage import Span
from oval_adapters.texts.planting import joined, plant, statement_piece
from oval_adapters.texts.running_text import RunningText, cut_places, tokenize
from oval_adapters.texts.tokens import Piece, encode, start_ids
from oval_core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Flavour = Literal["single", "later"]
FLAVOURS: tuple[Flavour, ...] = ("single", "later")

_NUMBER = re.compile(r"[0-9]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class PasskeyQuestion:
    """A question that a model completes with a code.

    Attributes:
        text: the question and the beginning of its answer, up to where the code follows.
        ids: long [Q], its tokens.
        code: what must follow.
        answer_ids: long [A], the right completion, to force it before a later question.
        depth: where in the running text the code is, 0 (first) to 1.
        place: tokens of the code in the prompt.
    """

    text: str
    ids: torch.Tensor
    code: str
    answer_ids: torch.Tensor
    depth: float
    place: Span


@dataclass(frozen=True, kw_only=True, slots=True)
class PasskeyCase:
    """A text with several codes and the question, or two, that are asked about them.

    Attributes:
        name: unique in its list.
        prompt_ids: long [context]: the text and the first question; generate from here.
        context: tokens of the prompt.
        first: the question at the end of the prompt.
        later: a question about another code, for a later turn: append the answer to the first, then its `ids`.
    """

    name: str
    prompt_ids: torch.Tensor
    context: int
    first: PasskeyQuestion
    later: PasskeyQuestion | None = None

    @property
    def judged(self) -> PasskeyQuestion:
        """The last question, whose code lies at the case's depth."""
        return self.later or self.first

    @property
    def code(self) -> str:
        """What must be generated after the last question."""
        return self.judged.code

    @property
    def depth(self) -> float:
        """Where in the text the code of the last question is, 0 to 1."""
        return self.judged.depth

    def later_ids(self) -> torch.Tensor:
        """Returns what follows the prompt until the later question is to be answered: the forced answer, the question."""
        assert self.later is not None
        return torch.cat([self.first.answer_ids, self.later.ids])


def passkey_cases(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int,
    depths: Sequence[float],
    count: int,
    seed: int,
    flavour: Flavour = "single",
    num_codes: int = 2,
    repeat: bool = False,
) -> list[PasskeyCase]:
    """Returns cases whose judged code lies at one of the depths; the other codes lie anywhere.

    Args:
        text: running text around the codes.
        tokenizer: the model's.
        context: tokens of each prompt, the first question included.
        depths: 0 to 1; cases take them in turn.
        count: cases in all.
        seed: of cities, codes and places. The cities are those that no training passage has.
        flavour: `single` asks once; `later` asks about another code first, and judges the answer to the next question.
        num_codes: codes in each text; a small model confuses them the more there are.
        repeat: repeat a text that is too short.

    Raises:
        ConfigError: a depth or a flavour that does not exist, a text too short, or a context too small for the codes.
    """
    if flavour not in FLAVOURS:
        raise ConfigError(f"flavour: got {flavour!r}; {did_you_mean(flavour, FLAVOURS)}")
    if not depths or not all(0 <= depth <= 1 for depth in depths):
        raise ConfigError(
            f"depths: got {list(depths)}. Allowed: one or more, each from 0 to 1. Change them."
        )
    fewest = 2 if flavour == "later" else 1
    if not fewest <= num_codes <= MOST_FACTS:
        raise ConfigError(
            f"num_codes: got {num_codes}. Allowed with {flavour}: {fewest} to {MOST_FACTS}. Change it."
        )
    if not text.strip():
        raise ConfigError("text: got none. Allowed: running text. Give some.")
    whole = tokenize(tokenizer, "the text", text)
    whole, starts = cut_places(whole, context, count, seed, repeat=repeat)
    cases = []
    for i, start in enumerate(starts):
        rng, depth = random.Random(f"{flavour} {seed} {i}"), depths[i % len(depths)]
        window = whole.window(start, context)
        facts = passkeys(rng, "test", num_codes, tokenizer.decode(window.ids))
        others = [rng.random() for _ in facts[1:]]
        cases.append(
            _case(f"passkey/{flavour} {i}", tokenizer, window, facts, [depth, *others], flavour)
        )
    return cases


def grade(generated: str, code: str) -> bool:
    """Returns whether the first number of a generated text is the code."""
    number = _NUMBER.search(generated)
    return number is not None and number[0] == code


def _case(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    window: RunningText,
    facts: list[Fact],
    depths: list[float],
    flavour: Flavour,
) -> PasskeyCase:
    # fact 0 is judged; under `later` fact 1 is asked first
    context, first = len(window.ids), 1 if flavour == "later" else 0
    before = start_ids(tokenizer)
    question = encode(tokenizer, _until_code(facts[first]))
    pieces = [statement_piece(tokenizer, fact, " ") for fact in facts]
    length = context - len(before) - len(question.ids)
    room = length - sum(len(piece.ids) for piece in pieces)
    if room < 0:
        raise ConfigError(
            f"context: got {context}, which is too small for {len(facts)} codes and a question. Allowed: "
            f"{context - room} or more. Raise it."
        )
    planted = plant(window, pieces, [round(depth * room) for depth in depths], length)
    prompt = joined([Piece(before), planted, question])

    def asked(index: int) -> PasskeyQuestion:
        fact = facts[index]
        text = _until_code(fact)
        return PasskeyQuestion(
            text=text,
            ids=torch.tensor(encode(tokenizer, text).ids),
            code=fact.value,
            answer_ids=torch.tensor(encode(tokenizer, fact.asked.removeprefix(text)).ids),
            depth=depths[index],
            place=prompt.spans[index],
        )

    return PasskeyCase(
        name=name,
        prompt_ids=torch.tensor(prompt.ids),
        context=context,
        first=asked(first),
        later=asked(0) if flavour == "later" else None,
    )


def _until_code(fact: Fact) -> str:
    return fact.asked[: fact.asked.rindex(fact.value)].rstrip()
