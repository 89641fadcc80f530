"""Runs the demo part by part: one that fails says why, and the others go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oval_adapters.bench.machine import machine, versions
from oval_adapters.demo.settings import DONE, FAILED, SKIPPED, Answer, DemoSettings, Part
from oval_adapters.models import build_model
from oval_adapters.models.catalog import MODELS
from oval_core.errors import ConfigError

if TYPE_CHECKING:
    from oval_adapters.evaluation.mm_run import StepBar

__all__ = ["Demo", "Say", "run_demo"]

Say = Callable[[str], None]
"""Is told what begins, in a line."""

Work = Callable[[], dict[str, Any]]
"""Runs a part and returns its values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demo:
    """What the demo gave.

    Attributes:
        parts: by name, in the order in which they ran.
        answer: with what it read; None where that failed.
        facts: versions, machine, seconds of the whole.
    """

    parts: dict[str, Part]
    answer: Answer | None
    facts: dict[str, Any]

    @property
    def is_whole(self) -> bool:
        """Whether no part failed."""
        return all(part.state != FAILED for part in self.parts.values())

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, ready for JSON."""
        return {
            "whole": self.is_whole,
            "parts": {name: part.to_dict() for name, part in self.parts.items()},
            **self.facts,
        }


def run_demo(
    settings: DemoSettings, say: Say, step_bar: StepBar, *, began: float | None = None
) -> Demo:
    """Runs every part.

    Args:
        settings: how.
        say: hears what begins.
        step_bar: shows progress of the evaluations.
        began: `time.perf_counter()` of when the command began, to count its imports; None counts from here.
    """
    import torch

    from oval_adapters.load_model import resolve_device

    begin, works = time.perf_counter(), _Works(settings, say, step_bar)
    started = begin if began is None else began
    parts = {}
    for name, (line, work) in works.by_name().items():
        say(line)
        parts[name] = _run(name, work)
        if parts[name].state == FAILED:
            say(f"{name} failed: {parts[name].reason}")
    facts = {
        "seconds": round(time.perf_counter() - started, 2),
        "start_s": round(begin - started, 2),
        "quick": settings.quick,
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "machine": machine(resolve_device(settings.device)),
    }
    return Demo(parts=parts, answer=works.answered, facts=facts)


class _SkippedError(Exception):
    """A part has nothing to run on, which is no failure."""


class _Works:
    """The parts, and what one leaves for the next."""

    def __init__(self, settings: DemoSettings, say: Say, step_bar: StepBar) -> None:
        self._settings, self._say, self._step_bar = settings, say, step_bar
        self._sees = False
        self.answered: Answer | None = None

    def by_name(self) -> dict[str, tuple[str, Work]]:
        """Returns what is said before each part, and the part, in order."""
        return {
            "models": ("building the models", self._models),
            "answer": (
                f"answering, with {self._settings.fast_tokens} tokens in fast memory and the rest in a file",
                self._answer,
            ),
            "mmbench_sample": ("asking the sample in MMBench's form", self._sample),
            "acceptance": ("decoding prompts with and without drafts", self._acceptance),
        }

    def _models(self) -> dict[str, Any]:
        values = _build(self._settings, self._say)
        self._sees = values["vision_model"] is not None
        return values

    def _answer(self) -> dict[str, Any]:
        from oval_adapters.demo.answering import answer_about_picture, answer_about_text

        ask = answer_about_picture if self._sees else answer_about_text
        self.answered = ask(self._settings)
        return dict(self.answered.values)

    def _sample(self) -> dict[str, Any]:
        from oval_adapters.demo.measuring import measure_sample

        if not self._sees:
            raise _SkippedError(f"there is no {self._settings.vision_model} to ask")
        return measure_sample(self._settings, self._step_bar)

    def _acceptance(self) -> dict[str, Any]:
        from oval_adapters.demo.measuring import measure_acceptance

        return measure_acceptance(self._settings, self._step_bar)


def _run(name: str, work: Work) -> Part:
    begin = time.perf_counter()
    try:
        values = work()
    except _SkippedError as told:
        return Part(name=name, state=SKIPPED, reason=str(told))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told, and the other parts go on
        seconds = time.perf_counter() - begin
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return Part(name=name, state=FAILED, seconds=seconds, reason=reason)
    return Part(name=name, state=DONE, seconds=time.perf_counter() - begin, values=values)


def _build(settings: DemoSettings, say: Say) -> dict[str, Any]:
    """Builds what is embedded; a vision model without trained weights is left out, and that is said."""
    vision: str | None = settings.vision_model
    for name in (settings.text_model, settings.vision_model):
        if name not in MODELS:
            continue
        if name == settings.vision_model:
            try:
                _ = MODELS[name].source_sha256
            except ConfigError:
                say(f"{name} has no trained weights in this OVAL yet: the demo runs on text alone, with {settings.text_model}")  # fmt: skip
                vision = None
                continue
        build_model(name)
    shown = [None if name is None else name.rsplit("/", 1)[-1] for name in (settings.text_model, vision)]  # fmt: skip
    return {"text_model": shown[0], "vision_model": shown[1]}
