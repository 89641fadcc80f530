"""From questions about pictures to a trained router of image pages in a folder: records, fits, trains, judges, saves."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from oval_adapters.attachment import attach
from oval_adapters.bench.machine import machine, versions
from oval_adapters.clip.load import load_clip
from oval_adapters.evaluation.mm_model import check_vision_model
from oval_adapters.load_model import load_config_of
from oval_adapters.routing.resolve import model_facts
from oval_adapters.training.image_router_record import (
    Gathered,
    Tick,
    draw_asks,
    gather_records,
)
from oval_adapters.training.image_router_settings import SHARES, ImageRouterTraining
from oval_adapters.vision.prefill_settings import prompt_vectors
from oval_core.config import check_int
from oval_core.errors import ConfigError
from oval_mm.fusion_checkpoint import TrainedFusion, save_fusion
from oval_mm.fusion_clip import fit_to_clip
from oval_mm.fusion_recall import Sampled, recall_table
from oval_mm.fusion_router import FusionConfig, FusionRouter
from oval_mm.fusion_split import split_by_picture
from oval_mm.fusion_training import FusionTraining, train_fusion
from oval_mm.page_choice import (
    ClipScorer,
    FeatureNormScorer,
    FusionScorer,
    ImagePageScorer,
    KeyMeanScorer,
    UniformScorer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from oval_adapters.evaluation.mm_run import Ask

__all__ = ["ImageRouterReport", "check_image_router", "train_and_save_image_router"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRouterReport:
    """What a training gave.

    Attributes:
        out: the router's folder.
        questions: that were recorded.
        held_out: of these, what judged, and chose the update that was kept.
        failed: why others could not be asked.
        image_pages: mean number of pages of a question.
        updates: optimiser steps in all.
        resumed_at: those that were done before this run.
        recall: a row for each of `SHARES`: share of the decoder's attention to image pages that the pages of each scorer
            hold on held-out questions; `start` is the router before its training.
        curve: one entry a validation; the loss of the first is None: nothing was trained yet.
        seconds: of `recording` and `training`, of this run.
        settings: without the places of this machine.
        model: name of the model.
        dtype: of its weights.
        versions: of the packages.
        machine: it ran on.
    """

    out: str
    questions: int
    held_out: int
    failed: Sequence[str]
    image_pages: float
    updates: int
    resumed_at: int
    recall: Sequence[Mapping[str, float]]
    curve: Sequence[Mapping[str, float | None]]
    seconds: Mapping[str, float]
    settings: Mapping[str, Any]
    model: str
    dtype: str
    versions: Mapping[str, str]
    machine: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, ready for JSON."""
        return asdict(self)


def check_image_router(settings: ImageRouterTraining) -> list[Ask]:
    """Returns the questions to record; raises an error where this cannot be trained, before weights are read.

    Raises:
        UnsupportedModelError: the model sees no images.
        ConfigError: a setting of the router is wrong, a table cannot be read, or the folder cannot be made.
    """
    check_vision_model(settings.model)
    text = load_config_of(settings.model).get_text_config(decoder=True)
    _router_config(settings, text.hidden_size)
    _training(settings)
    for layer in settings.layers or ():
        check_int("layers", layer, 0, text.num_hidden_layers - 1)
    asks = draw_asks(settings)
    for folder in (Path(settings.out), settings.recordings_folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"out: cannot make the folder {folder}: {error.strerror}. Allowed: a folder. Name another one."
            ) from error
    return asks


def train_and_save_image_router(
    model: PreTrainedModel,
    processor: Any,
    settings: ImageRouterTraining,
    asks: Sequence[Ask],
    tick: Tick,
) -> ImageRouterReport:
    """Trains a router for a model and writes it to `settings.out`; goes on from what an earlier run left there.

    Args:
        model: not attached.
        processor: of the model.
        settings: what to do.
        asks: the questions, see `check_image_router`.
        tick: told what runs, and how far it is.
    Raises:
        ConfigError: fewer than two questions could be asked, or all of them are about the same pictures.
    """
    begin = time.perf_counter()
    gathered = _gather(model, processor, settings, asks, tick)
    recorded, rows = time.perf_counter(), gathered.rows
    if len(rows) < 2:
        first = f" The first: {gathered.failed[0]}." if gathered.failed else ""
        raise ConfigError(
            f"data: {len(rows)} questions could be asked, {len(gathered.failed)} could not.{first} Allowed: two at least. "
            "Give more questions."
        )
    pictures = [record.pictures for record, _ in rows]
    train, held = split_by_picture(pictures, settings.held_out, settings.seed)
    size = model.config.get_text_config(decoder=True).hidden_size
    router = _begin(_router_config(settings, size), settings, [rows[place] for place in train])
    start = copy.deepcopy(router).eval()
    result = train_fusion([record for record, _ in rows], router, _training(settings), tick)
    judged = [rows[place] for place in held]
    public = settings.to_public_dict()
    report = ImageRouterReport(
        out=settings.out,
        questions=len(rows),
        held_out=len(held),
        failed=gathered.failed,
        image_pages=sum(record.view.num_image_pages for record, _ in rows) / len(rows),
        updates=settings.steps,
        resumed_at=result.resumed_at,
        recall=recall_table(_scorers(result.router, start), judged, SHARES),
        curve=[{name: _plain(value) for name, value in own.items()} for own in result.curve],
        seconds={
            "recording": round(recorded - begin, 1),
            "training": round(time.perf_counter() - recorded, 1),
        },
        settings=public,
        model=public["model"],
        dtype=str(model.dtype).removeprefix("torch."),
        versions=versions(),
        machine=machine(model.device),
    )
    _save(result.router, model, report)
    return report


def _gather(
    model: PreTrainedModel,
    processor: Any,
    settings: ImageRouterTraining,
    asks: Sequence[Ask],
    tick: Tick,
) -> Gathered:
    clip = settings.clip
    with attach(model, {"vision": {"tile": settings.tile}}) as oval:
        vectors = None
        if clip is not None:
            vectors = prompt_vectors(model, load_clip(clip), processor.tokenizer)
        return gather_records(oval, processor, asks, settings, vectors, tick)


def _save(router: FusionRouter, model: PreTrainedModel, report: ImageRouterReport) -> None:
    training = report.to_dict()
    del training["out"], training["failed"]
    facts = asdict(model_facts(model.config))
    save_fusion(report.out, TrainedFusion(router=router, model=facts, training=training))


def _router_config(settings: ImageRouterTraining, hidden_size: int) -> FusionConfig:
    return FusionConfig(hidden_size=hidden_size, size=settings.size, init=settings.init)


def _training(settings: ImageRouterTraining) -> FusionTraining:
    return FusionTraining(
        out=settings.out,
        updates=settings.steps,
        budget=settings.budget,
        held_out=settings.held_out,
        seed=settings.seed,
    )


def _begin(
    config: FusionConfig, settings: ImageRouterTraining, train: Sequence[Sampled]
) -> FusionRouter:
    """Returns the router as it is before training; what is fitted to CLIP sees no held-out question."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        router = FusionRouter(config)
    if config.init == "clip":
        fit_to_clip(router, [sample for _, sample in train if sample is not None])
    return router


def _scorers(router: FusionRouter, start: FusionRouter) -> dict[str, ImagePageScorer]:
    return {
        "router": FusionScorer(router),
        "start": FusionScorer(start),
        "clip": ClipScorer(),
        "key-mean": KeyMeanScorer(),
        "feature-norm": FeatureNormScorer(),
        "uniform": UniformScorer(),
    }


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else value
