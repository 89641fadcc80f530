"""From texts to a trained router in a folder: records, trains, saves, and draws the validation curve."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oval_adapters.bench.machine import machine, versions
from oval_adapters.routing.resolve import model_facts
from oval_adapters.texts import KINDS, read_source
from oval_adapters.training.gather import gather_recordings
from oval_adapters.training.router_loop import Progress, train_router
from oval_adapters.training.router_settings import RouterTraining
from oval_adapters.training.sizer_settings import SizerTraining
from oval_core.config import check_int
from oval_core.errors import ConfigError, PromptTooLongError, did_you_mean
from oval_core.routing.checkpoint import TrainedRouter, save_router
from oval_core.routing.output_aware import RouterConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["TrainReport", "check_passages", "check_training", "draw_curve", "train_and_save"]

CURVE_NAME = "curve.png"

Entry = Mapping[str, float | int | None]
"""One validation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReport:
    """What a training gave.

    Attributes:
        out: the router's folder.
        updates: optimiser steps in all.
        resumed_at: those that were done before this run.
        curve: one entry a validation; the loss of the first is None: nothing was trained yet.
        best: the entry of the router that was kept.
    """

    out: str
    updates: int
    resumed_at: int
    curve: tuple[Entry, ...]
    best: Entry

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, ready for JSON."""
        return asdict(self)


def check_training(config: PretrainedConfig, settings: RouterTraining) -> None:
    """Raises an error where this cannot be trained, before a model's weights are read.

    Raises:
        PromptTooLongError: the model has too few positions.
        ConfigError: a setting of the router is wrong, a file cannot be read, or the folder cannot be made.
    """
    text = config.get_text_config(decoder=True)
    RouterConfig.from_dict({"hidden_size": text.hidden_size, **settings.router})
    check_passages(config, settings)
    try:
        Path(settings.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"out: cannot make the folder {settings.out}: {error.strerror}. Allowed: a folder. Name another one."
        ) from error


def train_and_save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: RouterTraining,
    progress: Progress,
) -> TrainReport:
    """Trains a router for a model and writes it to `settings.out`; goes on from what an earlier run left there."""
    recordings = gather_recordings(model, tokenizer, settings, progress)
    result = train_router(recordings, settings, progress)
    curve = tuple({name: _plain(v) for name, v in entry.items()} for entry in result.curve)
    training = {
        "settings": _public(settings),
        "curve": curve,
        "versions": versions(),
        "machine": machine(model.device),
    }
    facts = model_facts(model.config)
    trained = TrainedRouter(router=result.router, model=facts, training=training)
    save_router(settings.out, trained)
    return TrainReport(
        out=settings.out,
        updates=settings.updates,
        resumed_at=result.resumed_at,
        curve=curve,
        best=max(curve, key=_score),
    )


def check_passages(config: PretrainedConfig, settings: RouterTraining | SizerTraining) -> None:
    """Raises an error where a model cannot run the passages of a training.

    Raises:
        PromptTooLongError: the model has too few positions.
        ConfigError: there is no such layer or kind, or a file cannot be read.
    """
    text = config.get_text_config(decoder=True)
    for layer in settings.dense_layers:
        check_int("dense_layers", layer, 0, text.num_hidden_layers - 1)
    limit, asked = getattr(text, "max_position_embeddings", None), settings.context + settings.steps
    if limit is not None and asked > limit:
        raise PromptTooLongError(
            f"context: got {settings.context} and {settings.steps} steps, {asked} tokens. Allowed: {limit}, the "
            "positions of this model. Ask for fewer, or take a model with a longer context."
        )
    for kind in settings.kinds:
        if kind not in KINDS:
            raise ConfigError(f"kinds: got {kind!r}; {did_you_mean(kind, KINDS)}")
    for path in settings.data:
        read_source(path)


def draw_curve(curve: Sequence[Entry], folder: Path) -> Path | None:
    """Writes recall by update of the router and of persistence; None where there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure  # no pyplot: it would keep a global figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    updates = [entry["updates"] for entry in curve]
    for axes, measure in zip(figure.subplots(1, 2), ("mass_recall", "missed_output"), strict=True):
        for name in ("router", "persistence"):
            axes.plot(updates, [e[f"{name}_{measure}"] for e in curve], marker="o", label=name)
        axes.set_xlabel("updates")
        axes.set_title(f"{measure.replace('_', ' ')}, held out, budget 10 %", fontsize="medium")
        axes.legend()
    path = folder / CURVE_NAME
    figure.savefig(path, dpi=120)
    return path


def _score(entry: Entry) -> float:
    # as the training loop judges
    return (entry["router_mass_recall"] or 0.0) - (entry["router_missed_output"] or 0.0)


def _public(settings: RouterTraining) -> dict[str, Any]:
    """Returns the settings without the places of this machine."""
    values = settings.to_dict()
    del values["out"], values["recordings"]
    if Path(settings.model).exists():
        values["model"] = Path(settings.model).name
    return values | {"data": [Path(path).name for path in settings.data]}


def _plain(value: float) -> float | None:
    return None if isinstance(value, float) and math.isnan(value) else value
