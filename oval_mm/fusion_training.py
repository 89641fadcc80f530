"""Trains a `FusionRouter` to predict where the decoder's attention goes. Reads records, runs no decoder.

Shapes: P pages (text pages first), as in `fusion_router.py`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from oval_core.config import check_int
from oval_core.errors import ConfigError
from oval_core.routing.loss import routing_loss
from oval_mm.fusion_router import FusionRouter, FusionView
from oval_mm.fusion_split import split_by_picture

__all__ = ["FusionRecord", "FusionResult", "FusionTraining", "image_recall", "oracle_recall", "record_recall", "train_fusion"]  # fmt: skip

Progress = Callable[[str, int, int], None]
_STATE, _WEIGHTS = "progress.json", "state.pt"
_WARMUP = 0.06


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionRecord:
    """One row and where the decoder looked.

    Attributes:
        view: as the router sees it.
        mass: [P] attention of the last question tokens on each page, text pages first, over heads and layers.
        shapes: rows and columns of each image's tokens; empty where nobody told.
        pictures: names of what the images show: records that share one are never split between training and judging.
    """

    view: FusionView
    mass: torch.Tensor
    shapes: tuple[tuple[int, int], ...] = ()
    pictures: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionTraining:
    """How a router is trained.

    Attributes:
        out: folder for checkpoints; a run with the same settings and records goes on from the last.
        updates: steps of AdamW.
        batch: rows a step.
        learning_rate: at its top; warm-up, then a cosine.
        weight_decay: of AdamW.
        gamma: of the focal loss.
        joint: weight of the loss over text and image pages together, beside 1 for the image pages alone.
        budget: share of the image pages by which recall is judged.
        held_out: share of the records that validate, one at least; see `split_by_picture`.
        save_every: updates between validations.
        seed: of order and split.
    """

    out: str
    updates: int = 1000
    batch: int = 8
    learning_rate: float = 1e-3
    weight_decay: float = 0.02
    gamma: float = 2.0
    joint: float = 0.25
    budget: float = 0.33
    held_out: float = 0.1
    save_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("updates", "batch", "save_every"):
            check_int(name, getattr(self, name), 1, None)
        for name in ("budget", "held_out"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(
                    f"{name}: got {getattr(self, name)!r}. Allowed: above 0, below 1. Pass a share."
                )


@dataclass(kw_only=True, slots=True)
class FusionResult:
    """What came out of a training.

    Attributes:
        router: the best on validation, in evaluation mode.
        curve: one entry a validation: updates, loss, recall at the budget, and what the best choice would get.
        resumed_at: updates that were done before this run began.
    """

    router: FusionRouter
    curve: list[dict[str, float]] = field(default_factory=list)
    resumed_at: int = 0


def train_fusion(
    records: Sequence[FusionRecord],
    router: FusionRouter,
    settings: FusionTraining,
    progress: Progress,
) -> FusionResult:
    """Trains a router as it is (random, key-mean or fitted to CLIP) and returns the best on held-out records.

    Raises:
        ConfigError: fewer than two records, or all of them share pictures.
    """
    if len(records) < 2:
        raise ConfigError(
            f"records: got {len(records)}. Allowed: two at least, one to train on and one to judge by. Record more."
        )
    run = _Run(records, router, settings, progress)
    run.resume()
    run.loop()
    return run.result()


@torch.no_grad()
def image_recall(router: FusionRouter, records: Sequence[FusionRecord], share: float) -> float:
    """Returns the share of the image pages' mass that the router's best `share` of them hold, mean over records."""
    return sum(
        record_recall(router.density(r.view)[r.view.num_text_pages :], r, share) for r in records
    ) / len(records)


def oracle_recall(records: Sequence[FusionRecord], share: float) -> float:
    """Returns what `image_recall` would be with the masses known."""
    found = (record_recall(r.mass[r.view.num_text_pages :], r, share) for r in records)
    return sum(found) / len(records)


def record_recall(scores: torch.Tensor, record: FusionRecord, share: float) -> float:
    """Returns the share of the image pages' mass that the best `share` of them hold, by scores [P] of image pages."""
    mass = record.mass[record.view.num_text_pages :].float()
    count = max(1, int(share * len(mass) + 1e-6))
    best = scores.float().cpu().topk(count).indices
    return float(mass.cpu()[best].sum() / mass.sum().clamp(min=1e-12))


class _Run:
    """One training, from wherever it stands to its end."""

    def __init__(
        self,
        records: Sequence[FusionRecord],
        router: FusionRouter,
        settings: FusionTraining,
        progress: Progress,
    ) -> None:
        self._router, self._settings, self._progress = router, settings, progress
        train, held = split_by_picture(
            [r.pictures for r in records], settings.held_out, settings.seed
        )
        self._held_out = [records[i] for i in held]
        self._train = [records[i] for i in train]
        self._optimizer = torch.optim.AdamW(
            router.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, self._rate)
        self._folder = Path(settings.out) / "fusion-checkpoint"
        self._told = self._fingerprint(len(records))
        self._done = self._resumed_at = 0
        self._curve: list[dict[str, float]] = []
        self._best = -math.inf
        self._best_state: dict[str, torch.Tensor] = {}

    def resume(self) -> None:
        """Goes on from the last checkpoint of the same training, if there is one."""
        path = self._folder / _STATE
        if not path.is_file():
            return
        state = json.loads(path.read_text(encoding="utf-8"))
        if state["training"] != self._told:
            return  # another training was here; it is overwritten
        held = torch.load(self._folder / f"{state['done']}-{_WEIGHTS}", weights_only=True)
        self._router.load_state_dict(held["router"])
        self._optimizer.load_state_dict(held["optimizer"])
        self._schedule.load_state_dict(held["schedule"])
        self._done = self._resumed_at = state["done"]
        self._curve, self._best = state["curve"], state["best"]
        self._best_state = held["best"]

    def loop(self) -> None:
        """Trains to the last update."""
        settings = self._settings
        if not self._curve:
            self._validate(math.nan)
        losses: list[float] = []
        while self._done < settings.updates:
            losses.append(self._update())
            self._done += 1
            self._progress("training", self._done, settings.updates)
            if self._done % settings.save_every == 0 or self._done == settings.updates:
                self._validate(sum(losses) / len(losses))
                losses.clear()
                self._save()

    def result(self) -> FusionResult:
        """Returns the best router on validation."""
        self._router.load_state_dict(self._best_state)
        return FusionResult(
            router=self._router.eval(), curve=self._curve, resumed_at=self._resumed_at
        )

    def _update(self) -> float:
        settings = self._settings
        chance = random.Random(f"{settings.seed}:{self._done}")  # the same after a resume
        self._router.train()
        rows = [chance.choice(self._train) for _ in range(settings.batch)]
        loss = torch.stack([self._loss(row) for row in rows]).mean()
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._router.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        return float(loss.detach())

    def _loss(self, record: FusionRecord) -> torch.Tensor:
        scores = self._router(record.view)[None]
        target = record.mass.to(scores)[None]
        is_image = torch.arange(scores.shape[-1], device=scores.device)
        is_image = is_image >= record.view.num_text_pages
        gamma, joint = self._settings.gamma, self._settings.joint
        loss = routing_loss(scores, target, is_image, gamma)
        if joint:
            loss = loss + joint * routing_loss(scores, target, torch.ones_like(is_image), gamma)
        return loss

    def _validate(self, loss: float) -> None:
        router, share = self._router.eval(), self._settings.budget
        with torch.no_grad():
            held = [float(self._loss(record)) for record in self._held_out]
        entry = {
            "updates": float(self._done),
            "loss": loss,
            "held_out_loss": sum(held) / len(held),
            "recall": image_recall(router, self._held_out, share),
            "oracle": oracle_recall(self._held_out, share),
        }
        self._curve.append(entry)
        if entry["recall"] > self._best:
            self._best = entry["recall"]
            self._best_state = {n: t.detach().clone() for n, t in router.state_dict().items()}

    def _save(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        held = {
            "router": self._router.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "best": self._best_state,
        }
        name = f"{self._done}-{_WEIGHTS}"
        torch.save(held, self._folder / name)
        state = {
            "training": self._told,
            "done": self._done,
            "curve": self._curve,
            "best": self._best,
        }
        unfinished = self._folder / f"{_STATE}.tmp"
        unfinished.write_text(json.dumps(state), encoding="utf-8")
        unfinished.replace(
            self._folder / _STATE
        )  # names the weights: a cut in between loses nothing
        for old in self._folder.glob(f"*-{_WEIGHTS}"):
            if old.name != name:
                old.unlink()

    def _fingerprint(self, num_records: int) -> dict[str, Any]:
        """Returns what must be equal for a run to go on: settings, records, and where the router begins."""
        first = self._train[0]
        start = [float(p.detach().double().abs().sum()) for p in self._router.parameters()]
        plain = {
            "settings": dataclasses.asdict(self._settings),
            "router": self._router.config.to_dict(),
            "records": [num_records, float(first.mass.double().sum()), float(first.view.text.double().sum())],
            "start": start,
        }  # fmt: skip
        loaded: dict[str, Any] = json.loads(json.dumps(plain))
        return loaded

    def _rate(self, step: int) -> float:
        updates = self._settings.updates
        warmup = max(1, int(_WARMUP * updates))
        left = 0.5 * (1 + math.cos(math.pi * min(1.0, step / updates)))
        return min(1.0, (step + 1) / warmup) * max(left, 0.02)
