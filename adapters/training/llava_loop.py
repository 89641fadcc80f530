"""The training loop of a small LLaVA: from wherever a run stands to its end, as if it had never stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from oval_adapters.training.llava_features import FeatureStore
from oval_adapters.training.llava_lessons import Lessons, check_rows
from oval_adapters.training.llava_measure import measure
from oval_adapters.training.llava_rows import RowMaker, collate
from oval_adapters.training.llava_settings import LlavaTraining
from oval_adapters.training.llava_student import Student, trained_tensors
from oval_adapters.training.resumable_loop import ResumableLoop, Tick, rate_share
from oval_mm.scenes import Library, draw

__all__ = ["LlavaTrainer"]


class LlavaTrainer(ResumableLoop):
    """One training; its samples are questions.

    Attributes:
        student: what learns.
        lessons: what it learns from.
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
        """Makes what a run needs; arguments that are not named here as in `ResumableLoop`.

        Args:
            student: new, or with weights to go on from.
            store: of features.
            library: of the scenes.
            maker: of rows.
            image_token: id.
        """
        self.student, self._store, self._library = student, store, library
        self._image_token = image_token
        self.lessons = Lessons(library, maker, settings)
        self._checks = {
            name: check_rows(library, maker, settings, held_out=held_out)
            for name, held_out in (("known", False), ("never_seen", True))
        }
        optimiser = torch.optim.AdamW(
            student.groups(settings.projector_rate, settings.lora_rate),
            betas=(0.9, 0.98),
            weight_decay=0.0,
        )
        super().__init__(
            settings, optimiser, identity=identity, tick=tick, log=log, is_stopping=is_stopping
        )

    def tensors(self) -> Sequence[tuple[str, torch.Tensor]]:
        """See `ResumableLoop`."""
        return trained_tensors(self.student)

    def update(self, progress: float) -> tuple[float, int]:
        """See `ResumableLoop`."""
        lessons = self.lessons.at(self.done, progress)
        pictures = [draw(self.lessons.scenes[number], self._library) for one in lessons for number in one.scenes]  # fmt: skip
        batch = collate([lesson.row for lesson in lessons], self._image_token)
        share = rate_share(self.done, progress)
        for group in self._optimiser.param_groups:
            group["lr"] = group["peak"] * share
        self._optimiser.zero_grad(set_to_none=True)
        loss = self.student.loss(batch, self._store.of(pictures))
        loss.backward()
        trained = [p for group in self._optimiser.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        self._optimiser.step()
        return loss.item(), sum(len(lesson.row.parts) for lesson in lessons)

    def measure(self, tick: Tick) -> dict[str, Any]:
        """Returns by part of the split what `llava_measure.measure` says."""
        rows = sum(map(len, self._checks.values()))
        label, before = f"validating after {self.done} updates", 0
        found: dict[str, Any] = {}
        for name, checks in self._checks.items():
            found[name] = measure(
                self.student, self._store, self._library, checks, self._image_token,
                lambda done, before=before: tick(label, before + done, rows),
            )  # fmt: skip
            before += len(checks)
        return found
