"""Asked row by row, processors say what they say of the batch, with several texts for a prompt too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation import logits_process as hf
from transformers.generation.logits_process import LogitsProcessorList

from oval_adapters.speculative.row_processors import processors_by_row

V = 20
PROMPTS = torch.tensor([[3, 4, 5, 6, 3], [7, 8, 9, 7, 8], [3, 4, 9, 4, 9]])


def allowed(row: int, ids: torch.Tensor) -> list[int]:
    """Other tokens for each row and each last token."""
    return [row, 5 + row + int(ids[-1]) % 5, 15]


MADE: dict[str, Callable[[int], Any]] = {
    "repetition": lambda rows: hf.RepetitionPenaltyLogitsProcessor(1.5),
    "repetition of new ones": lambda rows: hf.RepetitionPenaltyLogitsProcessor(
        1.5, torch.arange(rows)
    ),
    "of the prompt": lambda rows: hf.EncoderRepetitionPenaltyLogitsProcessor(1.5, PROMPTS),
    "runs of the prompt": lambda rows: hf.EncoderNoRepeatNGramLogitsProcessor(2, PROMPTS),
    "allowed": lambda rows: hf.PrefixConstrainedLogitsProcessor(allowed, 1),
    "allowed for each prompt": lambda rows: hf.PrefixConstrainedLogitsProcessor(
        allowed, rows // len(PROMPTS)
    ),
    "runs": lambda rows: hf.NoRepeatNGramLogitsProcessor(2),
}


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("name", MADE)
def test_rows_are_treated_as_in_the_batch(name: str, copies: int) -> None:
    rows = len(PROMPTS) * copies
    torch.manual_seed(4)
    new = torch.randint(3, 10, (rows, 3))
    new[:, -1] = 4  # followed by 5, nothing and 9 in the prompts
    ids = torch.cat([PROMPTS.repeat_interleave(copies, 0), new], 1)
    scores = torch.randn(rows, V)
    processor = MADE[name](rows)
    before = {key: str(value) for key, value in vars(processor).items()}
    by_row = processors_by_row(LogitsProcessorList([processor]), rows)
    got = [by_row[i](ids[i : i + 1], scores[i : i + 1].clone()) for i in reversed(range(rows))]
    assert {key: str(value) for key, value in vars(processor).items()} == before
    want = processor(ids, scores.clone())
    torch.testing.assert_close(torch.cat(got[::-1]), want)
    assert not torch.equal(want, scores), "nothing was to be seen"
