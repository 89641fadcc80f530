"""Asks a LLaVA questions about pictures and notes where it looks; what was noted once lies on disk."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from oval_adapters.evaluation.mm_mmbench import make_plan
from oval_adapters.evaluation.mm_model import Asker
from oval_adapters.evaluation.mm_run import Ask
from oval_adapters.training.image_router_settings import ImageRouterTraining
from oval_adapters.vision.prefill_record import record_prefill
from oval_core.errors import OvalError
from oval_mm.fusion_clip import ClipSample
from oval_mm.fusion_recall import Sampled
from oval_mm.fusion_router import FusionView
from oval_mm.fusion_training import FusionRecord
from oval_mm.mmbench import read_mmbench
from oval_mm.pictures import PictureError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from oval_adapters.attachment import Attachment
    from oval_adapters.vision.prefill_clip import PromptVectors

__all__ = ["Gathered", "QuestionReader", "draw_asks", "gather_records"]

Tick = Callable[[str, int, int], None]
_PROBES = 8
"""Numbers of each weight by which models of one name are told apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """What was recorded.

    Attributes:
        rows: records, with what CLIP says of them where one is named.
        failed: why questions could not be asked.
    """

    rows: list[Sampled]
    failed: list[str]


def draw_asks(settings: ImageRouterTraining) -> list[Ask]:
    """Returns the questions of all tables, as `oval eval mmbench --vanilla` asks them.

    Raises:
        ConfigError: a table cannot be read.
    """
    asks: list[Ask] = []
    for path in settings.data:
        plan = make_plan(Path(path).name, read_mmbench(path), circular=False, style=settings.style)
        own = plan.asks()
        random.Random(settings.seed).shuffle(own)
        asks += own[: settings.questions or None]
    return asks


class QuestionReader(Asker):
    """Makes inputs, and answers nothing."""

    def inputs(self, ask: Ask) -> Any:
        """Returns what the model gets of a question.

        Raises:
            OvalError, PictureError: this question cannot be put to the model.
        """
        prompt = self.prompt(ask.text, len(ask.pictures))
        inputs = self._inputs(prompt, [self._fitted(ask.load(name)) for name in ask.pictures])
        self._oval.check_prompt(inputs["input_ids"], inputs.get("attention_mask"))
        return inputs.to(self._oval.model.device, self._oval.model.dtype)


def gather_records(
    oval: Attachment,
    processor: Any,
    asks: Sequence[Ask],
    settings: ImageRouterTraining,
    vectors: PromptVectors | None,
    tick: Tick,
) -> Gathered:
    """Returns a record of each question, those in the folder read back.

    Args:
        oval: the attached model; it reads everything.
        processor: of the model.
        asks: the questions.
        settings: how attention is noted, and where it is kept.
        vectors: makes CLIP embeddings.
        tick: called after each.
    """
    reader = QuestionReader(oval, processor, max_new_tokens=1)
    facts = _facts(oval.model, settings)
    rows: list[Sampled] = []
    failed = []
    for number, ask in enumerate(asks, start=1):
        path = settings.recordings_folder / f"{_stamp(facts, ask)}.pt"
        try:
            if not path.is_file():
                row = _record(oval, reader.inputs(ask), ask, settings, vectors)
                _save(path, row, oval.model.dtype)
            rows.append(_load(path))
        except (PictureError, OvalError) as error:
            failed.append(f"{ask.name}: {' '.join(str(error).split())}")
        tick("recording where the model looks", number, len(asks))
    return Gathered(rows=rows, failed=failed)


def _record(
    oval: Attachment,
    inputs: Any,
    ask: Ask,
    settings: ImageRouterTraining,
    vectors: PromptVectors | None,
) -> Sampled:
    found = record_prefill(
        oval,
        inputs,
        num_queries=settings.num_queries,
        layers=settings.layers,
        vectors=vectors,
    )
    record, sample = found[0]
    return replace(record, pictures=tuple(map(str, ask.pictures))), sample


def _save(path: Path, row: Sampled, dtype: torch.dtype) -> None:
    record, sample = row
    view = record.view
    held = {
        "text": view.text.to(dtype),  # as the model has them: nothing is lost
        "image": view.image.to(dtype),
        "text_page": view.text_page,
        "image_page": view.image_page,
        "mass": record.mass,
        "shapes": [list(shape) for shape in record.shapes],
        "pictures": list(record.pictures),
        "clip": None if sample is None else [sample.question, sample.pages],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(held, partial)
    partial.replace(path)


def _load(path: Path) -> Sampled:
    held = torch.load(path, weights_only=True)
    view = FusionView(**{name: held[name] for name in ("text", "image", "text_page", "image_page")})
    record = FusionRecord(
        view=view,
        mass=held["mass"],
        shapes=tuple((rows, columns) for rows, columns in held["shapes"]),
        pictures=tuple(held["pictures"]),
    )
    if held["clip"] is None:
        return record, None
    question, pages = held["clip"]
    return record, ClipSample(view=view, question=question, pages=pages)


def _facts(model: PreTrainedModel, settings: ImageRouterTraining) -> list[Any]:
    """Returns what every recording depends on; a model that was trained on is another one, whatever its name."""
    digest = hashlib.sha256()
    for weight in model.parameters():
        flat = weight.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // _PROBES)][:_PROBES].float().cpu()
        digest.update(some.numpy().tobytes())
    layers = None if settings.layers is None else list(settings.layers)
    return [
        digest.hexdigest(),
        str(model.dtype),
        settings.num_queries,
        layers,
        settings.tile,
        settings.clip,
    ]


def _stamp(facts: Sequence[Any], ask: Ask) -> str:
    told = json.dumps([list(facts), ask.text, list(map(str, ask.pictures))])
    return hashlib.sha256(told.encode()).hexdigest()[:24]
