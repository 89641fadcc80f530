"""Passages that must look back: facts are put into running text at random depths, then asked for in another order."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from oval_adapters.texts.dialogue import FILLER, render
from oval_adapters.texts.facts import MOST_FACTS, SENTENCES, Fact, Split, key_values
from oval_adapters.texts.passage import Passage
from oval_adapters.texts.planting import joined, plant, question_piece, statement_piece, value_in
from oval_adapters.texts.running_text import RunningText, cut_places
from oval_adapters.texts.tokens import Piece, encode, start_ids
from oval_core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oval_adapters.texts.source import Records

FAMILIES = (*SENTENCES, "uuid", "turns")
"""What is asked for: codes, what somebody sells, who a pronoun was, UUIDs of a list, and any of these in later turns."""

_TOKENS_PER_FACT = 128  # of the text, on average
_READ = f"Read this text and remember its facts.\n\n{FILLER}\n\n"
_LIST_START, _LIST_GAP, _LIST_END = "\n\nJSON data:\n{", ", ", "}"


def retrieval_passages(
    text: RunningText,
    tokenizer: PreTrainedTokenizerBase,
    *,
    records: tuple[Records, ...] = (),
    context: int,
    steps: int,
    count: int,
    seed: int,
    split: Split,
    families: Sequence[str] = FAMILIES,
    repeat: bool = False,
) -> list[Passage]:
    """Returns passages whose continuation asks for facts of the prompt, one after the other.

    Args:
        text: what stands around the facts.
        tokenizer: the model's, the one that made the text's tokens.
        records: key-value lists for the family `uuid`; without any, random pairs.
        context: tokens of a prompt.
        steps: tokens of a continuation; its last question may be cut off.
        count: passages; they take the families in turn.
        seed: of everything that is random.
        split: training and test have no city, name, thing or key in common.
        families: some of `FAMILIES`.
        repeat: repeat a text that is too short.

    Raises:
        ConfigError: unknown family, text too short, or a context in which no fact has room.
    """
    for family in families:
        if family not in FAMILIES:
            raise ConfigError(f"families: got {family!r}; {did_you_mean(family, FAMILIES)}")
    text, starts = cut_places(text, context, count, seed, repeat=repeat)
    passages = []
    for i, start in enumerate(starts):
        family = families[i % len(families)]
        rng = random.Random(f"{split} {family} {seed} {i}")
        writer = _Writer(tokenizer, text.window(start, context), rng, split, steps)
        if family == "uuid":
            written = writer.key_value_list(records)
        elif family == "turns":
            written = writer.turns()
        else:
            written = writer.sentences(family)
        passages.append(written.passage(f"retrieval/{family} {i}", steps))
    return passages


@dataclass(frozen=True, slots=True)
class _Written:
    """A passage before its continuation is cut.

    Attributes:
        prompt: spans are the facts.
        rest: spans are the answers.
        asked: by answer, the index of its fact.
    """

    prompt: Piece
    rest: Piece
    asked: list[int]

    def passage(self, name: str, steps: int) -> Passage:
        whole = [n for n, (_, end) in enumerate(self.rest.spans) if end <= steps]
        return Passage(
            kind="retrieval",
            name=name,
            prompt_ids=torch.tensor(self.prompt.ids),
            continuation_ids=torch.tensor(self.rest.ids[:steps]),
            answers=tuple(self.rest.spans[n] for n in whole),
            sources=tuple(self.prompt.spans[self.asked[n]] for n in whole),
        )


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes one passage into a window of running text as long as the prompt."""

    tokenizer: PreTrainedTokenizerBase
    text: RunningText
    rng: random.Random
    split: Split
    steps: int

    def sentences(self, family: str) -> _Written:
        """Facts as sentences in the text, questions after it."""
        before = start_ids(self.tokenizer)
        room = len(self.text.ids) - len(before)
        facts, pieces = self._fitting(self._facts(family), room)
        prompt = joined([Piece(before), self._planted(pieces, room)])
        return self._asked(facts, prompt)

    def key_value_list(self, records: tuple[Records, ...]) -> _Written:
        """A list of pairs after as much text as makes the prompt whole, then questions."""
        before, end = start_ids(self.tokenizer), encode(self.tokenizer, _LIST_END).ids
        room = len(self.text.ids) - len(before) - len(end)
        # a pair takes more than 8 tokens with any tokenizer
        facts = key_values(self.rng, self.split, max(room // 8, 1), records)
        pieces: list[Piece] = []
        for fact in facts:
            piece = statement_piece(self.tokenizer, fact, _LIST_GAP if pieces else _LIST_START)
            if len(piece.ids) > room:
                break
            room -= len(piece.ids)
            pieces.append(piece)
        self._check_room(pieces)
        filler = Piece([*before, *self.text.ids[:room]])
        return self._asked(facts[: len(pieces)], joined([filler, *pieces, Piece(end)]))

    def turns(self) -> _Written:
        """Text and a question in the first turn; later turns ask for other facts of the text."""
        facts = self._facts(self.rng.choice(sorted(SENTENCES)))
        turns = [_READ + facts[0].question, facts[0].answer]
        # what stands around the text does not depend on later turns
        around = render(
            self.tokenizer, [*turns, facts[0].question, facts[0].answer], 2, asked=False
        )
        head, middle = encode(self.tokenizer, around.head), encode(self.tokenizer, around.middle)
        room = len(self.text.ids) - len(head.ids) - len(middle.ids)
        facts, pieces = self._fitting(facts, room)
        prompt = joined([head, self._planted(pieces, room), middle])

        order, asked, tokens = asking_order(self.rng, len(facts), seen=0), [], 0
        while tokens < self.steps:
            asked.append(next(order))
            tokens += len(question_piece(self.tokenizer, facts[asked[-1]]).ids)
            turns += [facts[asked[-1]].question, facts[asked[-1]].answer]
        rendered = render(self.tokenizer, turns, 2, asked=False)
        answers = rendered.turns[1::2]
        values = [value_in(facts[i], at) for i, at in zip(asked, answers, strict=True)]
        return _Written(prompt, encode(self.tokenizer, rendered.rest, values), asked)

    def _facts(self, family: str) -> list[Fact]:
        wanted = min(max(2, len(self.text.ids) // _TOKENS_PER_FACT), MOST_FACTS)
        text = self.tokenizer.decode(self.text.ids)
        return SENTENCES[family](self.rng, self.split, wanted, text)

    def _fitting(self, facts: list[Fact], room: int) -> tuple[list[Fact], list[Piece]]:
        # facts take at most half of the text
        pieces = [statement_piece(self.tokenizer, fact, " ") for fact in facts]
        while pieces and sum(len(piece.ids) for piece in pieces) > room // 2:
            pieces.pop()
        self._check_room(pieces)
        return facts[: len(pieces)], pieces

    def _check_room(self, pieces: list[Piece]) -> None:
        if not pieces:
            raise ConfigError(
                f"context: got {len(self.text.ids)}, in which no fact has room. Allowed: more, by the tokenizer; 256 is "
                "enough for most. Raise it."
            )

    def _planted(self, pieces: list[Piece], room: int) -> Piece:
        text = room - sum(len(piece.ids) for piece in pieces)
        places = [self.rng.randrange(text + 1) for _ in pieces]
        return plant(self.text, pieces, places, room)

    def _asked(self, facts: list[Fact], prompt: Piece) -> _Written:
        order, asked = asking_order(self.rng, len(facts)), []
        pieces, tokens = [], 0
        while tokens < self.steps:
            asked.append(next(order))
            pieces.append(question_piece(self.tokenizer, facts[asked[-1]]))
            tokens += len(pieces[-1].ids)
        return _Written(prompt, joined(pieces), asked)


def asking_order(rng: random.Random, count: int, seen: int | None = None) -> Iterator[int]:
    """Yields the indices of facts for ever, each round in another order; the first round leaves out `seen`."""
    left = [index for index in range(count) if index != seen]
    while True:
        rng.shuffle(left)
        yield from left
        left = list(range(count))
