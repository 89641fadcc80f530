"""The training loop of a small LLaVA: from wherever a run stands to its end, as if it had never stopped."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from oval_adapters.training.llava_features import FeatureStore
from oval_adapters.training.llava_lessons import Lessons, check_rows
from oval_adapters.training.llava_measure import measure
from oval_adapters.training.llava_rows import RowMaker, collate
from oval_adapters.training.llava_settings import LlavaTraining
from oval_adapters.training.llava_student import Student, trained_tensors
from oval_core.errors import ConfigError
from oval_mm.scenes import Library, draw

__all__ = ["CHECKPOINT_NAME", "LlavaTrainer", "TrainingStopped"]

CHECKPOINT_NAME = "checkpoint.pt"
WARM_UP = 20
"""Updates in which learning rates rise."""
LEAST_RATE = 0.05
"""Share of a learning rate that is left at the end."""

Tick = Callable[[str, int, int], None]


class TrainingStopped(KeyboardInterrupt):
    """A stop was asked for; the checkpoint is written."""


class LlavaTrainer:
    """One training.

    Attributes:
        student: what learns.
        curve: one entry a validation.
        done: updates.
        resumed_at: updates of earlier runs.
        notes: plain facts that the checkpoint keeps, such as how alignment went.
        seconds: of all runs, validation included.
        samples: questions that were learnt from in this run.
        learning_s: of this run, validation not included.
    """

    def __init__(
        self,
        student: Student,
        store: FeatureStore,
        library: Library,
        maker: RowMaker,
        image_token: int,
        settings: LlavaTraining,
        *,
        identity: dict[str, Any],
        tick: Tick,
        log: Callable[[list[dict[str, Any]]], None],
        is_stopping: Callable[[], bool],
    ) -> None:
        """Makes what a run needs.

        Args:
            student: new, or with weights to go on from.
            store: of features.
            library: of the scenes.
            maker: of rows.
            image_token: id.
            settings: of the training.
            identity: plain values that a checkpoint must agree with.
            tick: told what runs and how far it is.
            log: given the curve after each validation.
            is_stopping: asked after each update.
        """
        self.student, self._store, self._library = student, store, library
        self._image_token, self._settings, self._identity = image_token, settings, identity
        self._tick, self._log, self._is_stopping = tick, log, is_stopping
        self.lessons = Lessons(library, maker, settings)
        self._checks = {
            name: check_rows(library, maker, settings, held_out=held_out)
            for name, held_out in (("known", False), ("never_seen", True))
        }
        self._optimiser = torch.optim.AdamW(
            student.groups(settings.projector_rate, settings.lora_rate),
            betas=(0.9, 0.98),
            weight_decay=0.0,
        )
        self._path = Path(settings.out) / CHECKPOINT_NAME
        self.curve: list[dict[str, Any]] = []
        self.done = self.resumed_at = self.samples = 0
        self.notes: dict[str, Any] = {}
        self.seconds = self.learning_s = 0.0
        self._losses: list[float] = []

    def resume(self) -> bool:
        """Takes the checkpoint up; returns whether there was one.

        Raises:
            ConfigError: it is of a training with other settings, or cannot be read.
        """
        if not self._path.exists():
            return False
        try:
            state = torch.load(self._path, weights_only=True)
            changed = sorted(key for key in self._identity if state["identity"].get(key) != self._identity[key])  # fmt: skip
            if changed:
                raise ConfigError(
                    f"out: {self._path.parent} holds a training with other settings ({', '.join(changed)}). Allowed: the "
                    "same settings, or another folder. Name another folder, or delete this one."
                )
            with torch.no_grad():
                for name, tensor in trained_tensors(self.student):
                    tensor.copy_(state["weights"][name])
            self._optimiser.load_state_dict(state["optimiser"])
        except (OSError, RuntimeError, KeyError, ValueError, EOFError, pickle.UnpicklingError) as error:  # fmt: skip
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"out: {self._path} cannot be gone on from ({error}). Allowed: a whole checkpoint. Delete it."
            ) from error
        self.done = self.resumed_at = state["done"]
        self.curve, self.notes = state["curve"], state["notes"]
        self.seconds, self._losses = state["seconds"], state["losses"]
        return True

    def save(self) -> None:
        """Writes the checkpoint, whole or not at all."""
        state = {
            "identity": self._identity,
            "weights": {n: t.detach().clone() for n, t in trained_tensors(self.student)},
            "optimiser": self._optimiser.state_dict(),
            "done": self.done,
            "curve": self.curve,
            "notes": self.notes,
            "seconds": self.seconds,
            "losses": self._losses,
        }
        partial = self._path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._path)

    def run(self) -> None:
        """Trains to the end.

        Raises:
            TrainingStopped: a stop was asked for; the checkpoint is written.
        """
        begin, before = time.monotonic(), self.seconds
        while (progress := self.progress()) < 1:
            began = time.monotonic()
            self._update(progress)
            self.learning_s += time.monotonic() - began
            self.done += 1
            self._show()
            self.seconds = before + time.monotonic() - begin
            if self.done % self._settings.validate_every == 0 and self.progress() < 1:
                self.validate()
                self.seconds = before + time.monotonic() - begin
            if self._is_stopping():
                self.save()
                raise TrainingStopped
            if self.done % self._settings.save_every == 0:
                self.save()
        if not self.curve or self.curve[-1]["updates"] != self.done:
            self.validate()
            self.seconds = before + time.monotonic() - begin
        self.save()

    def progress(self) -> float:
        """Returns the share of the training that is done."""
        if self._settings.steps is not None:
            return self.done / self._settings.steps
        assert self._settings.minutes is not None, "the settings have one of both"
        return self.seconds / (60 * self._settings.minutes)

    def validate(self) -> None:
        """Adds an entry to the curve."""
        rows = sum(map(len, self._checks.values()))
        entry: dict[str, Any] = {"updates": self.done, "seconds": round(self.seconds, 1)}
        entry["loss"] = sum(self._losses) / len(self._losses) if self._losses else None
        before = 0
        for name, checks in self._checks.items():
            label = f"validating after {self.done} updates"
            entry[name] = measure(
                self.student, self._store, self._library, checks, self._image_token,
                lambda done, label=label, before=before: self._tick(label, before + done, rows),
            )  # fmt: skip
            before += len(checks)
        self._losses = []
        self.curve.append(entry)
        self._log(self.curve)

    def _update(self, progress: float) -> None:
        lessons = self.lessons.at(self.done, progress)
        pictures = [draw(self.lessons.scenes[number], self._library) for one in lessons for number in one.scenes]  # fmt: skip
        batch = collate([lesson.row for lesson in lessons], self._image_token)
        rate = min(1.0, (self.done + 1) / WARM_UP)
        rate *= LEAST_RATE + (1 - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        for group in self._optimiser.param_groups:
            group["lr"] = group["peak"] * rate
        self._optimiser.zero_grad(set_to_none=True)
        loss = self.student.loss(batch, self._store.of(pictures))
        loss.backward()
        trained = [p for group in self._optimiser.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        self._optimiser.step()
        self._losses.append(loss.item())
        self.samples += sum(len(lesson.row.parts) for lesson in lessons)

    def _show(self) -> None:
        recent = self._losses[-20:]
        label = f"training, loss {sum(recent) / len(recent):.3f}"
        if self._settings.steps is not None:
            self._tick(label, self.done, self._settings.steps)
            return
        whole = self.done / max(1e-6, self.progress())
        self._tick(label, self.done, max(self.done, round(whole)) if self.seconds else self.done)
