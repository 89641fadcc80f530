"""Pictures with several questions each as one row: every question sees the pictures and itself. B rows, S tokens.

A row is what as many rows with one question each would be, without computing the pictures again: questions do not see each
other, and each one's positions go on from the pictures'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from oval_adapters.models.llava_prompt import ROLE, answer_text, opening, question_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Batch", "Part", "Row", "RowMaker", "collate"]

_NOTHING = -1
END_WEIGHT = 0.1
"""Weight of the token that ends a letter: it is always the same."""
WORDS_WEIGHT = 1.5
"""Weight of an answer in words, against 1 of a letter."""


@dataclass(frozen=True, slots=True)
class Part:
    """One question of a row, as tokens.

    Attributes:
        prompt: what is read.
        answer: what is said; the loss is on it.
        weights: of the answer's tokens.
        sees_pictures: whether it follows the row's pictures; else it stands for itself.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    weights: tuple[float, ...]
    sees_pictures: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """Pictures and questions.

    Attributes:
        opening: tokens up to the text, image tokens among them.
        parts: questions.
    """

    opening: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows as tensors.

    Attributes:
        tokens: int64 [B, S].
        positions: int64 [B, S].
        mask: which token sees which, bool [B, 1, S, S].
        is_image: where image tokens lie, bool [B, S].
        rows: row of each place that predicts a token of an answer, int64 [A].
        places: those places, int64 [A].
        targets: tokens that they should predict, int64 [A].
        weights: of the loss, float32 [A].
        answers: number of the answer that each belongs to, over all rows in order, int64 [A].
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    is_image: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    answers: torch.Tensor


class RowMaker:
    """Turns texts into rows with a tokenizer that knows the image token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, image_tokens: int) -> None:
        self._tokenizer, self._image_tokens = tokenizer, image_tokens
        self._openings: dict[int, tuple[int, ...]] = {}
        self._role = self._ids(ROLE)

    def opening(self, pictures: int) -> tuple[int, ...]:
        """Returns the tokens before the text of a turn with so many pictures."""
        if pictures not in self._openings:
            self._openings[pictures] = self._ids(opening(pictures, self._image_tokens))
        return self._openings[pictures]

    def part(self, text: str, answer: str, *, is_words: bool, sees_pictures: bool = True) -> Part:
        """Returns a question with its answer.

        Args:
            text: of the question, all of it.
            answer: text.
            is_words: whether words count, all alike; else the first token counts, a letter.
            sees_pictures: whether it is about the row's pictures.
        """
        prompt = self._ids(question_text(text))
        said = self._ids(answer_text(answer))
        if is_words:
            weights = (WORDS_WEIGHT / len(said),) * len(said)
        else:
            weights = (1.0,) * (len(said) - 1) + (END_WEIGHT,)
        return Part(prompt if sees_pictures else self._role + prompt, said, weights, sees_pictures)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False).input_ids)


def collate(rows: Sequence[Row], image_token: int) -> Batch:
    """Returns rows as one batch; short ones are filled up at the end with tokens that see themselves only."""
    lengths = [len(row.opening) + sum(len(part.prompt) + len(part.answer) for part in row.parts) for row in rows]  # fmt: skip
    size = max(lengths)
    tokens = torch.zeros(len(rows), size, dtype=torch.int64)
    positions = torch.zeros_like(tokens)
    group = torch.full_like(tokens, _NOTHING)  # 0 the opening, then 1 for the first question ...
    sees = torch.zeros(len(rows), size, dtype=torch.bool)
    found: list[tuple[int, int, int, float, int]] = []
    count = 0
    for at, row in enumerate(rows):
        end = len(row.opening)
        tokens[at, :end] = torch.tensor(row.opening)
        positions[at, :end] = torch.arange(end)
        group[at, :end] = 0
        for number, part in enumerate(row.parts, start=1):
            ids = part.prompt + part.answer
            start, end = end, end + len(ids)
            tokens[at, start:end] = torch.tensor(ids)
            first = len(row.opening) if part.sees_pictures else 0
            positions[at, start:end] = torch.arange(first, first + len(ids))
            group[at, start:end] = number
            sees[at, start:end] = part.sees_pictures
            place = start + len(part.prompt) - 1
            found += [(at, place + i, token, weight, count) for i, (token, weight) in enumerate(zip(part.answer, part.weights, strict=True))]  # fmt: skip
            count += 1
    own = group[:, :, None] == group[:, None, :]
    before = sees[:, :, None] & (group[:, None, :] == 0)
    mask = (own | before).tril() & (group != _NOTHING)[:, None, :]
    mask |= torch.eye(size, dtype=torch.bool)
    at, place, target, answer = torch.tensor([(e[0], e[1], e[2], e[4]) for e in found]).T
    return Batch(
        tokens=tokens,
        positions=positions,
        mask=mask[:, None],
        is_image=tokens == image_token,
        rows=at,
        places=place,
        targets=target,
        weights=torch.tensor([e[3] for e in found]),
        answers=answer,
    )
