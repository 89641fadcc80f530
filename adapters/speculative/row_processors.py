"""Logits processors for one row at a time. A tree asks about a node of one row, `generate` built them for a batch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import torch
from transformers.generation import logits_process as hf
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

from oval_core.errors import ConfigError

__all__ = ["check_processors", "processors_by_row"]

_REFUSED: tuple[tuple[type[LogitsProcessor], str], ...] = (
    (hf.UnbatchedClassifierFreeGuidanceLogitsProcessor, "runs the model itself, one token a call"),
    (hf.ClassifierFreeGuidanceLogitsProcessor, "mixes the rows of a batch"),
    (hf.DiaClassifierFreeGuidanceLogitsProcessor, "mixes the rows of a batch"),
    (hf.DiaEOSChannelFilterLogitsProcessor, "mixes the rows of a batch"),
    (hf.DiaEOSDelayPatternLogitsProcessor, "keeps a state from call to call"),
    (hf.SynthIDTextWatermarkLogitsProcessor, "keeps a state from call to call"),
    (hf.WhisperNoSpeechDetection, "runs the model itself"),
)


def check_processors(processors: LogitsProcessorList) -> None:
    """Raises `ConfigError` for processors that cannot be asked about a node of a tree."""
    for processor in processors:
        for kind, reason in _REFUSED:
            if isinstance(processor, kind):
                raise ConfigError(
                    f"custom_generate=oval.speculative: got {type(processor).__name__}, which {reason}. Allowed: "
                    "processors that go by the row's ids and scores alone. Leave it out, or leave custom_generate out."
                )


def processors_by_row(processors: LogitsProcessorList, rows: int) -> list[LogitsProcessorList]:
    """Returns for each row the processors that treat [1, L] ids and [1, V] scores as the batch would have been.

    A processor that `generate` does not make itself is taken as it is: it must go by its arguments alone.
    """
    if rows == 1:
        return [processors]
    return [LogitsProcessorList(_of_row(p, row, rows) for p in processors) for row in range(rows)]


def _of_row(processor: LogitsProcessor, row: int, rows: int) -> LogitsProcessor:
    for kind, change in _CHANGES.items():
        if isinstance(processor, kind):
            own = copy.copy(processor)
            change(own, row, rows)
            return own
    return processor


def _repetition(own: hf.RepetitionPenaltyLogitsProcessor, row: int, rows: int) -> None:
    ignored = own.prompt_ignore_length
    if isinstance(ignored, torch.Tensor):
        own.prompt_ignore_length = ignored[row : row + 1]


def _encoder_repetition(
    own: hf.EncoderRepetitionPenaltyLogitsProcessor, row: int, rows: int
) -> None:
    at = row // (rows // own.encoder_input_ids.shape[0])
    own.encoder_input_ids = own.encoder_input_ids[at : at + 1]


def _encoder_ngrams(own: hf.EncoderNoRepeatNGramLogitsProcessor, row: int, rows: int) -> None:
    own.generated_ngrams = [own.generated_ngrams[row // (rows // own.batch_size)]]
    own.batch_size = 1


def _prefix_allowed(own: hf.PrefixConstrainedLogitsProcessor, row: int, rows: int) -> None:
    own._prefix_allowed_tokens_fn = functools.partial(
        _allowed_for, own._prefix_allowed_tokens_fn, row // own._num_beams
    )
    own._num_beams = 1


def _allowed_for(
    allowed: Callable[[int, torch.Tensor], list[int]], batch_id: int, _: int, ids: torch.Tensor
) -> list[int]:
    return allowed(batch_id, ids)


_CHANGES: dict[type, Callable[..., None]] = {
    hf.RepetitionPenaltyLogitsProcessor: _repetition,
    hf.EncoderRepetitionPenaltyLogitsProcessor: _encoder_repetition,
    hf.EncoderNoRepeatNGramLogitsProcessor: _encoder_ngrams,
    hf.PrefixConstrainedLogitsProcessor: _prefix_allowed,
}
"""What a processor knows of its place in the batch, by its class."""
