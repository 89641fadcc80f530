"""From captioned pictures to a small CLIP in a folder that open_clip loads: trains, saves, reports."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from oval_adapters.bench.machine import machine, versions
from oval_adapters.training.clip_loop import ClipTrainer
from oval_adapters.training.clip_model import create_clip, open_clip_library
from oval_adapters.training.clip_settings import ClipTraining
from oval_adapters.training.medusa_stop import asked_to_stop
from oval_adapters.training.resumable_loop import Tick, write_log
from oval_core.errors import ConfigError
from oval_mm.scenes import Library

__all__ = ["LOG_NAME", "RECORD_NAME", "ClipReport", "train_and_save_clip"]

LOG_NAME = "training.jsonl"
RECORD_NAME = "training.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipReport:
    """What a training gave.

    Attributes:
        out: folder of the model.
        known_names: different names that were trained on.
        never_seen_names: those held out.
        updates: in all.
        resumed_at: those of earlier runs.
        minutes: of all runs.
        pairs_per_s: of this run, validation not included; 0 where nothing was left to do.
        parameters: of the model.
        curve: one entry a validation: updates, seconds, loss since the last one, and `ClipTrainer.measure`.
        file_bytes: of the weights.
        settings: of the training, without the places of this machine.
        sources: of the pictures.
        versions: of torch and open_clip, among others.
        machine: what ran it.
    """

    out: str
    known_names: int
    never_seen_names: int
    updates: int
    resumed_at: int
    minutes: float
    pairs_per_s: float
    parameters: int
    curve: list[dict[str, Any]]
    file_bytes: int
    settings: dict[str, Any]
    sources: list[str]
    versions: dict[str, str]
    machine: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, ready for JSON."""
        return asdict(self)


def train_and_save_clip(settings: ClipTraining, tick: Tick) -> ClipReport:
    """Trains and writes the model to `settings.out`; goes on from what an earlier run left there.

    Args:
        settings: of the training.
        tick: told what runs, how much of it is done, and of how much.

    Raises:
        TrainingStopped: Ctrl-C came; the same call goes on from there.
        ConfigError: open_clip or a folder of pictures is not there, or `settings.out` holds another training or cannot be
            written.
    """
    open_clip_library()  # told before thousands of captions are read
    library = Library(settings.pictures, settings.split_seed)
    clip = create_clip(settings)
    folder = Path(settings.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"out: cannot make the folder {folder}: {error.strerror}. Allowed: a folder. Name another one."
        ) from error
    with asked_to_stop() as is_stopping:
        trainer = ClipTrainer(
            clip,
            library,
            settings,
            identity=_identity(settings),
            tick=tick,
            log=lambda curve: write_log(folder / LOG_NAME, curve),
            is_stopping=is_stopping,
        )
        trainer.resume()
        trainer.run()
    return _save(trainer, library, settings)


def _save(trainer: ClipTrainer, library: Library, settings: ClipTraining) -> ClipReport:
    folder = Path(settings.out)
    report = ClipReport(
        out=settings.out,
        known_names=len(library.names(False)),
        never_seen_names=len(library.names(True)),
        updates=trainer.done,
        resumed_at=trainer.resumed_at,
        minutes=round(trainer.seconds / 60, 2),
        pairs_per_s=trainer.samples / trainer.learning_s if trainer.learning_s else 0.0,
        parameters=trainer.clip.num_parameters,
        curve=trainer.curve,
        file_bytes=trainer.clip.save(folder),
        settings=_public(settings),
        sources=list(settings.sources) or _names(settings.pictures),
        versions=versions() | {"open_clip_torch": open_clip_library().__version__},
        machine=machine(torch.device("cpu")),
    )
    record = report.to_dict()
    for name in ("out", "resumed_at", "pairs_per_s"):  # of this run, and of its machine
        del record[name]
    text = json.dumps(record, indent=2)
    (folder / RECORD_NAME).write_text(text + "\n", encoding="utf-8")
    return report


def _identity(settings: ClipTraining) -> dict[str, Any]:
    """Returns what a checkpoint depends on: other intervals, and a folder at another place, change no lesson."""
    values: dict[str, Any] = json.loads(json.dumps(settings.to_dict()))
    for name in ("out", "validate_every", "save_every", "validation", "sources"):
        del values[name]
    return values


def _public(settings: ClipTraining) -> dict[str, Any]:
    """Returns the settings without the places of this machine."""
    values = settings.to_dict()
    del values["out"], values["sources"]
    return values | {"pictures": _names(settings.pictures)}


def _names(folders: tuple[str, ...]) -> list[str]:
    return [Path(folder).name for folder in folders]
