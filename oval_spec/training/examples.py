"""What draft heads learn from: positions of a model's own answers. N positions, C hidden size, R rows, K heads.

The hidden state at position i predicts token i, which becomes the root of a tree; head k, counted from 0, then predicts
token i + 1 + k and may see tokens i .. i + k.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

CONTEXT = 8
"""Tokens of a prompt's end that are kept: heads may see so many before the root."""
MISSING = -1
"""In place of a token before the text begins, or after the answer ends."""


@dataclass(frozen=True, slots=True)
class HeadExamples:
    """Answers one after another.

    Attributes:
        hidden: last hidden states after the final norm, [N, C].
        tokens: token that each position predicts, int64 [N].
        text: the same tokens, each answer after the last `CONTEXT` tokens of its prompt, int64 [N + answers * CONTEXT].
        answers: number of the answer that a position is in, int64 [N].
        lengths: positions of each answer, int64 [answers].
        kinds: name of each answer's sort of prompt.
    """

    hidden: torch.Tensor
    tokens: torch.Tensor
    text: torch.Tensor
    answers: torch.Tensor
    lengths: torch.Tensor
    kinds: tuple[str, ...]

    @classmethod
    def join(
        cls,
        prompts: Sequence[torch.Tensor],
        tokens: Sequence[torch.Tensor],
        hidden: Sequence[torch.Tensor],
        kinds: Sequence[str],
    ) -> HeadExamples:
        """Puts answers together; there is one at least.

        Args:
            prompts: tokens of each prompt, [prompt length].
            tokens: tokens of each answer, [length].
            hidden: the states that predicted them, [length, C].
            kinds: one name an answer.
        """
        text = []
        for prompt, answer in zip(prompts, tokens, strict=True):
            end = prompt[-CONTEXT:].long()
            text += [torch.full((CONTEXT - len(end),), MISSING), end, answer.long()]
        lengths = torch.tensor([len(answer) for answer in tokens])
        return cls(
            torch.cat(list(hidden)),
            torch.cat(list(tokens)).long(),
            torch.cat(text),
            torch.arange(len(lengths)).repeat_interleave(lengths),
            lengths,
            tuple(kinds),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def to(self, device: torch.device) -> HeadExamples:
        """Returns these on a device."""
        names = ("hidden", "tokens", "text", "answers", "lengths")
        moved = {name: getattr(self, name).to(device) for name in names}
        return HeadExamples(**moved, kinds=self.kinds)

    def paths(self, rows: torch.Tensor, context: int, num_heads: int) -> torch.Tensor:
        """Returns the tokens before the root, the root and those after it, [R, context + K]; `MISSING` where none is.

        Args:
            rows: positions, int64 [R].
            context: tokens before the root, up to `CONTEXT`.
            num_heads: K.
        """
        assert context <= CONTEXT, "so many are kept"
        offsets = torch.arange(-context, num_heads, device=rows.device)
        places = rows[:, None] + offsets
        shift = CONTEXT * (self.answers[rows, None] + 1)
        found = self.text[(places + shift).clamp(max=len(self.text) - 1)]
        return found.where(places < self._ends(rows), MISSING)

    def places(self, rows: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Returns the position that each head predicts the token of, [R, K]; `MISSING` past the answer's end.

        Args:
            rows: positions, int64 [R].
            num_heads: K.
        """
        places = rows[:, None] + torch.arange(1, num_heads + 1, device=rows.device)
        return places.where(places < self._ends(rows), MISSING)

    def firsts(self) -> torch.Tensor:
        """Returns the first position of each answer, [answers]."""
        return self.lengths.cumsum(0) - self.lengths

    def _ends(self, rows: torch.Tensor) -> torch.Tensor:
        return self.lengths.cumsum(0)[self.answers[rows], None]


def split_by_prompt(
    prompts: Sequence[Sequence[int]], kinds: Sequence[str], share: float, seed: int
) -> tuple[list[int], list[int]]:
    """Returns the answers to train on and those held out; equal prompts stay on one side, each kind is on both.

    Args:
        prompts: token ids of each answer's prompt.
        kinds: sort of each prompt.
        share: of the different prompts of a kind that are held out; at least one where there are two.
        seed: of the draw.
    """
    of_prompt: dict[tuple[int, ...], list[int]] = {}
    for number, prompt in enumerate(prompts):
        of_prompt.setdefault(tuple(prompt), []).append(number)
    by_kind: dict[str, list[list[int]]] = {}
    for numbers in of_prompt.values():
        by_kind.setdefault(kinds[numbers[0]], []).append(numbers)
    train: list[int] = []
    held_out: list[int] = []
    for kind in sorted(by_kind):
        groups = by_kind[kind]
        random.Random(f"{seed}:{kind}").shuffle(groups)
        count = min(max(1, round(share * len(groups))), len(groups) - 1)
        held_out += [number for group in groups[:count] for number in group]
        train += [number for group in groups[count:] for number in group]
    return sorted(train), sorted(held_out)


def frequent_tokens(
    tokens: torch.Tensor, size: int, vocab_size: int, others: torch.Tensor | None = None
) -> tuple[torch.Tensor, int]:
    """Returns the most frequent tokens, ascending, and how many of them are in no text.

    Where fewer than `size` different tokens were said, the most frequent ones of `others` fill up, and then the lowest ids
    of the vocabulary: in tokenizers that merge pairs these were merged first, so they are frequent in general.

    Args:
        tokens: what was said, any shape, int64.
        size: tokens to return, at most `vocab_size`.
        vocab_size: ids are below.
        others: what was read, such as the prompts: answers take names and rare words from there.
    """
    said = torch.bincount(tokens.flatten(), minlength=vocab_size)
    read = torch.zeros_like(said)
    if others is not None:
        read = torch.bincount(others.flatten(), minlength=vocab_size)
    # Stable, by the lesser key first: what is equal in both stays in order of ids.
    order = torch.sort(read, descending=True, stable=True).indices
    order = order[torch.sort(said[order], descending=True, stable=True).indices][:size]
    return order.sort().values, int((said[order] + read[order] == 0).sum())
