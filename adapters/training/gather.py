"""Recordings that a training needs: made once, kept in a folder, found again when the training goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from oval_adapters.routing.recorder import RecordOptions, record
from oval_adapters.texts import Passage, passages
from oval_adapters.texts.facts import Split
from oval_adapters.training.router_settings import RouterTraining
from oval_core.routing.recording import Recording, load_recording

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["gather_recordings"]

Tick = Callable[[str, int, int], None]
"""Told what was done, how many of how many."""


def gather_recordings(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: RouterTraining,
    tick: Tick,
    split: Split = "train",
) -> list[Recording]:
    """Returns a recording of each passage that the settings name, those in the folder read back.

    Args:
        model: not attached.
        tokenizer: the model's.
        settings: which passages, and where recordings are kept.
        tick: called after each.
        split: facts of retrieval passages to train on, or others to judge by.
    """
    made = passages(
        settings.kinds,
        settings.data,
        tokenizer,
        context=settings.context,
        steps=settings.steps,
        count=settings.passages,
        seed=settings.data_seed,
        split=split,
    )
    options = RecordOptions(
        page_size=settings.page_size,
        dense_layers=settings.dense_layers,
        layer_groups=settings.layer_groups,
        output_every=0,
        signals=("quest", "sketch"),
    )
    folder, dtype = settings.recordings_folder, str(model.dtype)
    found = []
    for i, passage in enumerate(made):
        path = folder / f"{_stamp(settings.model, dtype, passage, options)}.safetensors"
        if not path.is_file():
            recording = record(
                model,
                passage.prompt_ids,
                passage.continuation_ids,
                kind=passage.kind,
                name=passage.name,
                options=options,
            )
            recording.save(path)
        found.append(load_recording(path))  # the same numbers, made now or found
        tick("recording", i + 1, len(made))
    return found


def _stamp(model: str, dtype: str, passage: Passage, options: RecordOptions) -> str:
    """Names what a recording depends on."""
    ids = [*passage.prompt_ids.tolist(), -1, *passage.continuation_ids.tolist()]
    facts = json.dumps([model, dtype, ids, repr(options)])
    return hashlib.sha256(facts.encode()).hexdigest()[:24]
