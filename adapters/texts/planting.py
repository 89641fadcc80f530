"""Puts facts into running text as tokens, so that a prompt has an exact length and every fact a known place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from oval_adapters.texts.facts import Fact
from oval_adapters.texts.running_text import RunningText
from oval_adapters.texts.tokens import Piece, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oval_adapters.texts.passage import Span


def statement_piece(tokenizer: PreTrainedTokenizerBase, fact: Fact, before: str) -> Piece:
    """Returns the tokens of a statement after `before`; its one span is the value."""
    text = before + fact.statement
    first = len(before) + fact.statement.index(fact.value)
    return encode(tokenizer, text, [(first, first + len(fact.value))])


def question_piece(tokenizer: PreTrainedTokenizerBase, fact: Fact) -> Piece:
    """Returns the tokens of a question with its answer; its one span is the value in the answer."""
    return encode(tokenizer, fact.asked, [value_in(fact, (0, len(fact.asked)))])


def value_in(fact: Fact, answer: Span) -> Span:
    """Returns the characters of the value in a text whose characters `answer` end with the fact's answer."""
    first = answer[1] - len(fact.answer) + fact.answer.rindex(fact.value)
    return first, first + len(fact.value)


def joined(pieces: Iterable[Piece]) -> Piece:
    """Returns one piece of all tokens, and all spans in order, moved to where they are now."""
    ids: list[int] = []
    spans: list[Span] = []
    for piece in pieces:
        spans += [(first + len(ids), last + len(ids)) for first, last in piece.spans]
        ids += piece.ids
    return Piece(ids, tuple(spans))


def plant(text: RunningText, pieces: Sequence[Piece], places: Sequence[int], length: int) -> Piece:
    """Returns `length` tokens: the beginning of a text with pieces put into it.

    Args:
        text: has at least as many tokens as are left for it.
        pieces: what to put in, each with one span.
        places: by piece, where in the text; it moves to the end of a sentence if one is near.
        length: tokens of the result; more than the pieces take.

    Returns:
        The tokens, and the span of each piece in the order of `pieces`.
    """
    room = length - sum(len(piece.ids) for piece in pieces)
    assert 0 <= room <= len(text.ids), (room, len(text.ids))
    moved = [text.sentence_end(min(place, room), room) for place in places]
    order = sorted(range(len(pieces)), key=moved.__getitem__)
    parts, done = [], 0
    for index in order:
        parts += [Piece(text.ids[done : moved[index]]), pieces[index]]
        done = moved[index]
    whole = joined([*parts, Piece(text.ids[done:room])])
    by_piece = dict(zip(order, whole.spans, strict=True))
    return Piece(whole.ids, tuple(by_piece[index] for index in range(len(pieces))))
