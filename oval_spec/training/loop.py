"""The training loop of draft heads: from wherever a run stands to its end, exactly as if it had never stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from oval_spec.heads.base import DraftHeads
from oval_spec.heads.facts import BaseWeights
from oval_spec.training.batches import Batches, DraftHead
from oval_spec.training.config import HeadTrainingConfig
from oval_spec.training.examples import HeadExamples
from oval_spec.training.loss import Tick
from oval_spec.training.measure import measure

Log = Callable[[Sequence[dict[str, Any]]], None]
"""Given the curve so far after each validation."""
CHECKPOINT_NAME = "checkpoint.pt"
_WARMUP = 0.1


class TrainingStopped(KeyboardInterrupt):
    """A stop was asked for; the checkpoint is written."""


@dataclass(kw_only=True, slots=True)
class TrainedHeads:
    """What came out.

    Attributes:
        heads: after the last update, in evaluation mode.
        curve: one entry a validation: updates, loss since the last one, and the fields of `Measured`.
        resumed_at: updates that were done before this run began.
        positions_per_s: of this run, validation not counted; 0 where nothing was left to do.
    """

    heads: DraftHeads
    curve: list[dict[str, Any]] = field(default_factory=list)
    resumed_at: int = 0
    positions_per_s: float = 0.0


class HeadTrainer:
    """One training.

    Attributes:
        held_out: what it is judged by.
        updates: in all.
    """

    def __init__(
        self,
        heads: DraftHeads,
        base: BaseWeights,
        train: HeadExamples,
        held_out: HeadExamples,
        config: HeadTrainingConfig,
        *,
        folder: Path,
        identity: dict[str, Any],
        tick: Tick,
        log: Log,
        is_stopping: Callable[[], bool],
    ) -> None:
        """Prepares data and optimizer.

        Args:
            heads: bound, untrained, float32, with their vocabulary.
            base: weights that heads read.
            train: answers to learn from.
            held_out: answers to judge by.
            config: settings.
            folder: where the checkpoint lies.
            identity: plain values that a checkpoint must agree with to be gone on from.
            tick: called after each update.
            log: called with each validation.
            is_stopping: asked after each update; True saves and raises `TrainingStopped`.
        """
        self._heads, self._config = heads, config
        head = DraftHead.of(heads, base, getattr(torch, config.precision))
        device = heads.device
        self._train = Batches(
            heads, train.to(device), head, soft_tokens=config.soft_tokens, tick=tick
        )
        self.held_out = Batches(heads, held_out.to(device), head, soft_tokens=0, tick=tick)
        self._per_epoch = max(1, len(train) // config.batch_size)
        self.updates = self._per_epoch * config.epochs
        self._optimizer = torch.optim.AdamW(
            heads.parameters(),
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            betas=(0.9, 0.95),
        )
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(
            self._optimizer,
            config.learning_rate,
            total_steps=self.updates + 1,
            pct_start=_WARMUP,
            cycle_momentum=False,
        )
        self._path = folder / CHECKPOINT_NAME
        loop = asdict(config)
        del loop["validate_every"], loop["save_every"]  # they change nothing that is learnt
        self._identity = identity | {"loop": loop, "positions": len(train)}
        self._tick, self._log, self._is_stopping = tick, log, is_stopping
        self._done = self._resumed_at = 0
        self._curve: list[dict[str, Any]] = []
        self._losses: list[float] = []

    def run(self) -> TrainedHeads:
        """Trains to the last update, from the checkpoint if there is one of the same settings."""
        self._resume()
        spent, trained = 0.0, 0
        while self._done < self.updates:
            rows = self._rows()
            began = time.perf_counter()
            self._update(rows)
            spent, trained = spent + time.perf_counter() - began, trained + len(rows)
            self._done += 1
            self._tick("training", self._done, self.updates)
            is_last = self._done == self.updates
            if is_last or self._done % self._config.validate_every == 0:
                self._validate()
            is_stopping = self._is_stopping()
            if is_stopping or is_last or self._done % self._config.save_every == 0:
                self._save()
            if is_stopping and not is_last:
                raise TrainingStopped
        self._heads.eval()
        return TrainedHeads(
            heads=self._heads,
            curve=self._curve,
            resumed_at=self._resumed_at,
            positions_per_s=trained / spent if spent else 0.0,
        )

    def _rows(self) -> torch.Tensor:
        """Returns the positions of the next update: a place in the epoch's order, which only the seed decides."""
        epoch, number = divmod(self._done, self._per_epoch)
        if number == 0 or not hasattr(self, "_order"):
            draw = torch.Generator().manual_seed(self._config.seed * 100_003 + epoch)
            self._order = torch.randperm(len(self._train.examples), generator=draw)
        start = number * self._config.batch_size
        return self._order[start : start + self._config.batch_size].to(self._heads.device)

    def _update(self, rows: torch.Tensor) -> None:
        config = self._config
        self._heads.train()
        loss = self._train.loss(rows, config.decay, config.regression)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._heads.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        self._losses.append(float(loss.detach()))

    def _validate(self) -> None:
        self._heads.eval()
        found = measure(self.held_out)
        loss = sum(self._losses) / len(self._losses)
        self._losses = []
        entry = {"updates": self._done, "loss": loss, **found.to_dict()}
        self._curve.append(entry)
        self._log(self._curve)

    def _resume(self) -> None:
        if not self._path.is_file():
            return
        state = torch.load(self._path, weights_only=True, map_location=self._heads.device)
        if state["identity"] != self._identity:
            return  # another training was here; it is overwritten
        self._heads.load_state_dict(state["heads"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["rng"].cpu())
        self._done = self._resumed_at = state["done"]
        self._curve, self._losses = state["curve"], state["losses"]

    def _save(self) -> None:
        state = {
            "identity": self._identity,
            "heads": self._heads.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "rng": torch.get_rng_state(),
            "done": self._done,
            "curve": self._curve,
            "losses": self._losses,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".partial")
        torch.save(state, unfinished)
        unfinished.replace(self._path)  # a checkpoint that is there is whole
