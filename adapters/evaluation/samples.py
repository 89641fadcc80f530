"""Answers piece by piece, with how each token came, for a page. Knows a tokenizer, no report's form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oval_adapters.evaluation.rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Piece", "Sample", "make_samples", "pieces"]

PROMPT, DRAFTED, BONUS = "prompt", "drafted", "bonus"
"""How a token came: with the prompt's forward, accepted from a draft, or the target's own at the end of a step."""

_BROKEN = "\ufffd"


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Text that one token added, or several that make one letter.

    Attributes:
        text: what is read.
        origin: how its first token came: `prompt`, `drafted` or `bonus`.
        step: number of the step that gave it; 0 is the prompt's.
    """

    text: str
    origin: str
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One answer of one side.

    Attributes:
        name: of the prompt.
        category: of the prompt.
        label: of the side.
        tau: of this answer; None where no step was needed.
        pieces: the answer.
    """

    name: str
    category: str
    label: str
    tau: float | None
    pieces: tuple[Piece, ...]


def make_samples(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], label: str, most: int = 8
) -> list[Sample]:
    """Returns the first answers of a side, one of each category; none where prompts were decoded together."""
    firsts: dict[str, Row] = {}
    for row in rows:
        if row.sides[label].arrivals is not None:
            firsts.setdefault(row.category, row)
    return [_sample(tokenizer, row, label) for row in list(firsts.values())[:most]]


def pieces(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], arrivals: Sequence[int]
) -> tuple[Piece, ...]:
    """Returns an answer's text by token. Tokens that are parts of a letter wait for the rest of it.

    Args:
        tokenizer: of the model.
        ids: the answer.
        arrivals: how many tokens came together; the last may hold padding.
    """
    origins = _origins(arrivals)[: len(ids)]
    found: list[Piece] = []
    done, first = "", 0
    for place in range(len(ids)):
        text = tokenizer.decode(ids[: place + 1], skip_special_tokens=True)
        is_last = place == len(ids) - 1
        if not is_last and (text.endswith(_BROKEN) or not text.startswith(done)):
            continue
        if len(text) > len(done):
            origin, step = origins[first]
            found.append(Piece(text=text[len(done) :], origin=origin, step=step))
        done, first = text, place + 1
    return tuple(found)


def _origins(arrivals: Sequence[int]) -> list[tuple[str, int]]:
    """By token: how it came, and in which step."""
    found: list[tuple[str, int]] = []
    for step, count in enumerate(arrivals):
        last = PROMPT if step == 0 else BONUS
        found += [(DRAFTED, step)] * (count - 1) + [(last, step)]
    return found


def _sample(tokenizer: PreTrainedTokenizerBase, row: Row, label: str) -> Sample:
    side = row.sides[label]
    counts = side.counts
    return Sample(
        name=row.names[0],
        category=row.category,
        label=label,
        tau=counts.emitted / counts.steps if counts and counts.steps else None,
        pieces=pieces(tokenizer, side.ids[0], side.arrivals or ()),
    )
