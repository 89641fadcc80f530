"""What a passage is: a prompt, the text that follows it, and where that text repeats facts of the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["text", "retrieval", "chat"]
Span = tuple[int, int]
"""Places of tokens, first and one past the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """One text to measure or train routers on: the prompt is prefilled, the continuation is fed token by token.

    Attributes:
        kind: what sort of text.
        name: unique among the passages of one call, starts with the kind.
        prompt_ids: long [N].
        continuation_ids: long [T], what a decode would produce, or what a user says in later turns.
        answers: places in the continuation of the facts that it retrieves. The step that must find a fact is the one
            that predicts its first token: the input token at `start - 1`.
        sources: by answer, the places of the same fact in the prompt.
    """

    kind: Kind
    name: str
    prompt_ids: torch.Tensor
    continuation_ids: torch.Tensor
    answers: tuple[Span, ...] = ()
    sources: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.answers) == len(self.sources), (self.answers, self.sources)
        for spans, ids in (
            (self.answers, self.continuation_ids),
            (self.sources, self.prompt_ids),
        ):
            assert all(0 <= start < end <= len(ids) for start, end in spans), (spans, len(ids))
