"""Trains an `OutputAwareRouter` on recorded attention, in the closed loop that it will serve in."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from oval_adapters.training.examples import Example, closed_loop, examples
from oval_adapters.training.router_settings import RouterTraining
from oval_core.routing.loss import routing_loss
from oval_core.routing.output_aware import OutputAwareRouter, RouterConfig
from oval_core.routing.recall import mass_recall, missed_effect
from oval_core.routing.recording import Recording
from oval_core.routing.replay import replay
from oval_core.routing.rivals import BySignal, Persistence
from oval_core.routing.router import Router

__all__ = ["Progress", "TrainingResult", "train_router"]

Progress = Callable[[str, int, int], None]
_STATE = "progress.json"
_WARMUP = 0.06


@dataclass(kw_only=True, slots=True)
class TrainingResult:
    """What came out of a training.

    Attributes:
        router: the best on validation, in evaluation mode.
        curve: one entry a validation: updates, loss, and closed-loop recall of router and persistence.
        resumed_at: updates that were done before this run began.
    """

    router: OutputAwareRouter
    curve: list[dict[str, float]] = field(default_factory=list)
    resumed_at: int = 0


def train_router(
    recordings: Sequence[Recording], settings: RouterTraining, progress: Progress
) -> TrainingResult:
    """Trains on nine tenths of the recordings and keeps what is best on the rest.

    Each round runs the closed loop with the router as it is (the first with the key sketch), so that it learns from
    histories as it will meet them. Checkpoints lie in `settings.out`; a run with the same settings goes on from the last.
    """
    set_seed(settings.seed)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    train, held_out = _split(recordings, settings.seed)
    config = RouterConfig(
        hidden_size=recordings[0].hidden.shape[-1],
        num_groups=recordings[0].mass.shape[1],
        **settings.router,
    )
    router = OutputAwareRouter(config)
    optimizer = torch.optim.AdamW(
        [p for p in router.parameters() if p.requires_grad], lr=1.0, weight_decay=0.02
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, settings))
    router, optimizer, schedule = accelerator.prepare(router, optimizer, schedule)
    run = _Run(settings, accelerator, router, optimizer, schedule, train, held_out, progress)
    run.resume()
    run.loop()
    return run.result()


class _Run:
    """One training, from wherever it stands to its end."""

    def __init__(
        self,
        settings: RouterTraining,
        accelerator: Accelerator,
        router: OutputAwareRouter,
        optimizer: Any,
        schedule: Any,
        train: Sequence[Recording],
        held_out: Sequence[Recording],
        progress: Progress,
    ) -> None:
        self._settings, self._accelerator = settings, accelerator
        self._router, self._optimizer, self._schedule = router, optimizer, schedule
        self._train, self._held_out, self._progress = train, held_out, progress
        self._folder = Path(settings.out) / "checkpoint"
        self._done = self._resumed_at = 0
        self._curve: list[dict[str, float]] = []
        self._best = -math.inf
        self._best_state: dict[str, torch.Tensor] = {}
        self._rng = random.Random(settings.seed)

    def loop(self) -> None:
        """Trains to the last update."""
        settings = self._settings
        per_round = math.ceil(settings.updates / settings.rounds)
        if not self._curve:
            self._validate(math.nan)
        losses: list[float] = []
        while self._done < settings.updates:
            number = self._done // per_round
            found = self._gather(number)
            self._rng.seed(f"{settings.seed}:{self._done}")
            while self._done < min((number + 1) * per_round, settings.updates):
                losses.append(self._update(found))
                self._done += 1
                self._progress("training", self._done, settings.updates)
                if self._done % settings.save_every == 0 or self._done == settings.updates:
                    self._validate(sum(losses) / len(losses))
                    losses.clear()
                    self._save()

    def result(self) -> TrainingResult:
        """Returns the best router on validation."""
        router = self._accelerator.unwrap_model(self._router)
        router.load_state_dict(self._best_state)
        return TrainingResult(router=router.eval(), curve=self._curve, resumed_at=self._resumed_at)

    def resume(self) -> None:
        """Goes on from the last checkpoint of the same settings, if there is one."""
        path = self._folder / _STATE
        if not path.is_file():
            return
        state = json.loads(path.read_text(encoding="utf-8"))
        if state["settings"] != _plain(self._settings):
            return  # another training was here; it is overwritten
        self._accelerator.load_state(str(self._folder / "state"))
        self._done = self._resumed_at = state["done"]
        self._curve, self._best = state["curve"], state["best"]
        best = torch.load(self._folder / "best.pt", weights_only=True)
        self._best_state = best

    def _gather(self, number: int) -> list[Example]:
        settings, router = self._settings, self._accelerator.unwrap_model(self._router).eval()
        behaviour: Router = BySignal("sketch", "sketch", "step") if number == 0 else router
        self._progress(f"closed loop, round {number + 1} of {settings.rounds}", 0, 1)
        seed = settings.seed + 1000 * number
        with torch.no_grad():
            return examples(self._train, behaviour, settings.budgets, settings.leads, seed)

    def _update(self, found: Sequence[Example]) -> float:
        settings = self._settings
        self._router.train()
        example = self._rng.choice(found)
        stretch = self._rng.choice(example.stretches)
        lead = self._rng.choice(settings.leads)
        target = example.target(stretch, lead, settings.label)
        scores = self._router(example.view(stretch, lead))[: len(target)]
        free = example.candidates(stretch, closed_loop(settings.budgets[0]))[: len(target)]
        loss = routing_loss(scores, target, free, settings.gamma)
        self._optimizer.zero_grad()
        self._accelerator.backward(loss)
        self._accelerator.clip_grad_norm_(self._router.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        return float(loss.detach())

    def _validate(self, loss: float) -> None:
        router = self._accelerator.unwrap_model(self._router).eval()
        entry = {"updates": self._done, "loss": loss}
        for name, judged in (("router", router), ("persistence", Persistence())):
            recalls, errors = [], []
            for lead in sorted({self._settings.leads[0], self._settings.leads[-1]}):
                options = closed_loop(0.1, lead)
                for recording in self._held_out:
                    selections = replay(recording, judged, options)
                    recalls.append(mass_recall(recording, selections))
                    errors.append(missed_effect(recording, selections))
            entry[f"{name}_mass_recall"] = sum(recalls) / len(recalls)
            entry[f"{name}_missed_output"] = sum(errors) / len(errors)
        self._curve.append(entry)
        score = entry["router_mass_recall"] - entry["router_missed_output"]
        if score > self._best:
            self._best = score
            self._best_state = {n: t.detach().clone() for n, t in router.state_dict().items()}

    def _save(self) -> None:
        self._accelerator.save_state(str(self._folder / "state"))
        torch.save(self._best_state, self._folder / "best.pt")
        state = {
            "settings": _plain(self._settings),
            "done": self._done,
            "curve": self._curve,
            "best": self._best,
        }
        unfinished = self._folder / f"{_STATE}.tmp"
        unfinished.write_text(json.dumps(state), encoding="utf-8")
        unfinished.replace(self._folder / _STATE)


def _split(recordings: Sequence[Recording], seed: int) -> tuple[list[Recording], list[Recording]]:
    """Returns training and held-out recordings; a tenth of each kind, and at least one, is held out."""
    train: list[Recording] = []
    held_out: list[Recording] = []
    for kind in sorted({recording.kind for recording in recordings}):
        own = [recording for recording in recordings if recording.kind == kind]
        random.Random(seed).shuffle(own)
        count = max(1, len(own) // 10)
        held_out += own[:count]
        train += own[count:]
    return train, held_out


def _rate(step: int, settings: RouterTraining) -> float:
    warmup = max(1, int(_WARMUP * settings.updates))
    left = 0.5 * (1 + math.cos(math.pi * min(1.0, step / settings.updates)))
    return settings.learning_rate * min(1.0, (step + 1) / warmup) * max(left, 0.02)


def _plain(settings: RouterTraining) -> Any:
    return json.loads(json.dumps(settings.to_dict()))
