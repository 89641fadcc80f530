"""A training loop that stops at any update and goes on as if it never had; what is learnt is its subclass's affair."""

from __future__ import annotations

import abc
import json
import math
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from oval_core.errors import ConfigError

__all__ = [
    "CHECKPOINT_NAME",
    "LoopSettings",
    "ResumableLoop",
    "Tick",
    "TrainingStopped",
    "rate_share",
    "write_log",
]

CHECKPOINT_NAME = "checkpoint.pt"
WARM_UP = 20
"""Updates in which learning rates rise."""
LEAST_RATE = 0.05
"""Share of a learning rate that is left at the end."""

Tick = Callable[[str, int, int], None]


class TrainingStopped(KeyboardInterrupt):
    """A stop was asked for; the checkpoint is written."""


class LoopSettings(Protocol):
    """What the loop reads of a training's settings: `steps` or `minutes` ends it, the other is None."""

    @property
    def out(self) -> str: ...
    @property
    def steps(self) -> int | None: ...
    @property
    def minutes(self) -> float | None: ...
    @property
    def validate_every(self) -> int: ...
    @property
    def save_every(self) -> int: ...


class ResumableLoop(abc.ABC):
    """One training.

    Attributes:
        curve: one entry a validation.
        done: updates.
        resumed_at: updates of earlier runs.
        notes: plain facts that the checkpoint keeps.
        seconds: of all runs, validation included.
        samples: what was learnt from in this run.
        learning_s: of this run, validation not included.
    """

    def __init__(
        self,
        settings: LoopSettings,
        optimiser: torch.optim.Optimizer,
        *,
        identity: dict[str, Any],
        tick: Tick,
        log: Callable[[list[dict[str, Any]]], None],
        is_stopping: Callable[[], bool],
    ) -> None:
        """Begins at update 0.

        Args:
            settings: of the training.
            optimiser: of everything that is trained; its state is part of the checkpoint.
            identity: plain values that a checkpoint must agree with.
            tick: told what runs and how far it is.
            log: given the curve after each validation.
            is_stopping: asked after each update.
        """
        self._settings, self._optimiser, self._identity = settings, optimiser, identity
        self._tick, self._log, self._is_stopping = tick, log, is_stopping
        self._path = Path(settings.out) / CHECKPOINT_NAME
        self.curve: list[dict[str, Any]] = []
        self.done = self.resumed_at = self.samples = 0
        self.notes: dict[str, Any] = {}
        self.seconds = self.learning_s = 0.0
        self._losses: list[float] = []

    @abc.abstractmethod
    def tensors(self) -> Sequence[tuple[str, torch.Tensor]]:
        """Returns everything that training changes, by name."""

    @abc.abstractmethod
    def update(self, progress: float) -> tuple[float, int]:
        """Does update number `done`; returns its loss and how many samples it learnt from.

        Args:
            progress: share of the training that is done.
        """

    @abc.abstractmethod
    def measure(self, tick: Tick) -> dict[str, Any]:
        """Returns what a validation adds to the curve's entry.

        Args:
            tick: told what runs, how much of it is done, and of how much.
        """

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
                for name, tensor in self.tensors():
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
            "weights": {name: tensor.detach().clone() for name, tensor in self.tensors()},
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
            loss, samples = self.update(progress)
            self.learning_s += time.monotonic() - began
            self._losses.append(loss)
            self.samples += samples
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
        entry: dict[str, Any] = {"updates": self.done, "seconds": round(self.seconds, 1)}
        entry["loss"] = sum(self._losses) / len(self._losses) if self._losses else None
        entry |= self.measure(self._tick)
        self._losses = []
        self.curve.append(entry)
        self._log(self.curve)

    def _show(self) -> None:
        recent = self._losses[-20:]
        label = f"training, loss {sum(recent) / len(recent):.3f}"
        if self._settings.steps is not None:
            self._tick(label, self.done, self._settings.steps)
            return
        whole = self.done / max(1e-6, self.progress())
        self._tick(label, self.done, max(self.done, round(whole)) if self.seconds else self.done)


def rate_share(done: int, progress: float) -> float:
    """Returns the share of a learning rate: it rises for some updates, then falls as a cosine.

    Args:
        done: updates.
        progress: share of the training that is done.
    """
    rise = min(1.0, (done + 1) / WARM_UP)
    fall = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return rise * (LEAST_RATE + (1 - LEAST_RATE) * fall)


def write_log(path: Path, curve: Sequence[dict[str, Any]]) -> None:
    """Writes a curve as JSON lines, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(entry) + "\n" for entry in curve), encoding="utf-8")
    partial.replace(path)
