"""The run over questions about images: each is asked once, its row is kept at once, and a bad one stops nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oval_adapters.evaluation.mm_rows import AnswerRow, KeptAnswers
from oval_adapters.evaluation.ranks import Ranks
from oval_core.config import OvalConfig
from oval_core.errors import (
    BackendUnavailableError,
    ConfigError,
    OvalError,
    UnsupportedModelError,
)
from oval_mm.pictures import PictureError

if TYPE_CHECKING:
    from PIL.Image import Image

    from oval_adapters.evaluation.mm_model import Asker

__all__ = ["Ask", "Collected", "MMSettings", "StepBar", "ask_all", "collect"]

StepBar = Callable[[], AbstractContextManager[Callable[[str, int, int], None]]]
"""Opens a bar; what it gives is told the label, how many are done, and of how many."""


_ENDS_A_RUN = (ConfigError, UnsupportedModelError, BackendUnavailableError)
"""Faults of the settings or the model: every other row would fail by them too, and none is to blame."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MMSettings:
    """How questions are asked.

    Attributes:
        model: embedded name, folder or hub id.
        config: of OVAL.
        dtype: of the weights.
        device: to run on.
        max_new_tokens: tokens an answer, at most.
        pads_images: see `Asker`.
        blanks_images: see `Asker`.
        downsample: see `Asker`.
    """

    model: str
    config: OvalConfig
    dtype: str = "auto"
    device: str = "auto"
    max_new_tokens: int = 32
    pads_images: bool = False
    blanks_images: bool = False
    downsample: float | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(
                f"max-new-tokens: got {self.max_new_tokens}. Allowed: 1 or more. Give such a number."
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns what answers depend on, as plain values."""
        names = ("model", "dtype", "max_new_tokens", "pads_images", "blanks_images")
        facts = {**{name: getattr(self, name) for name in names}, "config": str(self.config)}
        limit = self._image_budget()
        return facts if limit is None else {**facts, "image_budget": limit}

    def told(self) -> dict[str, Any]:
        """Returns the same with each setting of OVAL by its own name, to say what differs between two runs."""
        own = {name: value for name, value in self.to_dict().items() if name != "image_budget"}
        return {**own, "config": asdict(self.config), "downsample": self.downsample}

    def _image_budget(self) -> dict[str, Any] | None:
        """Returns what part of images is read, by whose choice; None for all."""
        vision = self.config.vision
        if self.downsample is not None:
            return {"budget": self.downsample, "router": "downsample"}
        if vision is None or not vision.limits_images:
            return None
        share = vision.budget
        budget = vision.budget_tokens if share is None else float(share)
        return {"budget": budget, "router": Path(vision.router).name, "seed": vision.seed}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """One question to the model.

    Attributes:
        name: its index or id.
        label: shown while it runs.
        text: what is asked.
        pictures: names of its images.
        load: returns the image of a name.
    """

    name: str
    label: str
    text: str
    pictures: tuple[str | Path, ...]
    load: Callable[[Any], Image]


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """What a run gave.

    Attributes:
        rows: by unit, the number of the question.
        whole: whether all questions were tried.
        processes: that shared them.
        facts: dtype, backend, versions, machine.
    """

    rows: Sequence[AnswerRow]
    whole: bool
    processes: int
    facts: dict[str, Any]


def ask_all(asker: Asker, asks: Sequence[tuple[int, Ask]]) -> Iterator[AnswerRow]:
    """Yields a row for each question; one that cannot be asked gives its reason.

    Args:
        asker: the model.
        asks: unit and question.

    Raises:
        ConfigError: the settings do not go with the model; such errors are no row's fault.
    """
    for unit, ask in asks:
        begin = time.perf_counter()
        prompt, answer, reason = ask.text, None, None
        tokens: tuple[int | None, int | None] = (None, None)
        pages = None
        try:
            prompt = asker.prompt(ask.text, len(ask.pictures))
            answer = asker.answer(prompt, [ask.load(name) for name in ask.pictures])
            tokens, pages = asker.image_tokens, asker.image_pages
        except _ENDS_A_RUN:
            raise
        except (PictureError, OvalError) as error:
            reason = " ".join(str(error).split())
        seconds = time.perf_counter() - begin
        yield AnswerRow(
            unit=unit,
            name=ask.name,
            prompt=prompt,
            answer=answer,
            reason=reason,
            seconds=seconds,
            image_tokens=tokens[0],
            image_tokens_read=tokens[1],
            image_pages=pages,
        )


def collect(
    settings: MMSettings,
    asks: Sequence[Ask],
    us: Ranks,
    step_bar: StepBar,
    *,
    out: Path | None = None,
    resume: bool = False,
) -> Collected:
    """Asks all questions, those of an earlier run excepted. The model is loaded only if something is left to ask.

    Args:
        settings: how.
        asks: what.
        us: the processes.
        step_bar: shows progress.
        out: folder that keeps rows.
        resume: whether rows in it count.

    Raises:
        OvalError: the model, or the folder, is not usable.
    """
    from oval_adapters.evaluation.mm_model import check_vision_model

    check_vision_model(settings.model)
    kept, done = None, []
    if out is not None:
        stamp, told = _stamp(settings, asks), settings.told()
        kept = KeptAnswers(out, stamp, resume=resume, rank=us.index, settings=told)
        done = kept.read()
    us.gather([])  # nobody writes before all have read
    known = {row.unit for row in done}
    left = [(unit, ask) for unit, ask in enumerate(asks) if unit not in known]
    rows: list[AnswerRow] = []
    facts = {**_facts(settings), **({} if kept is None else kept.facts)}
    if left:
        mine = us.share(left)
        with _asker(settings) as (asker, facts):
            if kept is not None:
                kept.open({name: facts[name] for name in ("dtype", "backend")})
            with contextlib.suppress(KeyboardInterrupt), step_bar() as step:
                for row in ask_all(asker, mine):
                    if kept is not None:
                        kept.add(row)  # type: ignore[arg-type]
                    rows.append(row)
                    step(asks[row.unit].label, len(rows), len(mine))
        if len(rows) < len(mine) and us.count > 1:
            raise KeyboardInterrupt  # the other processes were stopped too: nothing can be gathered
    every = sorted([*done, *us.gather(rows)], key=lambda row: row.unit)
    return Collected(rows=every, whole=len(every) == len(asks), processes=us.count, facts=facts)


@contextlib.contextmanager
def _asker(settings: MMSettings) -> Iterator[tuple[Asker, dict[str, Any]]]:
    from oval_adapters.attachment import attach
    from oval_adapters.evaluation.mm_model import Asker, load_processor
    from oval_adapters.load_model import load_model

    processor = load_processor(settings.model)
    model = load_model(settings.model, settings.dtype, settings.device)
    with attach(model, settings.config) as oval:
        asker = Asker(
            oval,
            processor,
            max_new_tokens=settings.max_new_tokens,
            pads_images=settings.pads_images,
            blanks_images=settings.blanks_images,
            downsample=settings.downsample,
        )
        dtype = str(model.dtype).removeprefix("torch.")
        yield asker, {**_facts(settings), "dtype": dtype, "backend": oval.backend}


def _facts(settings: MMSettings) -> dict[str, Any]:
    import torch

    from oval_adapters.bench.machine import machine, versions
    from oval_adapters.load_model import resolve_device

    return {
        "dtype": settings.dtype,
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "machine": machine(resolve_device(settings.device)),
    }


def _stamp(settings: MMSettings, asks: Sequence[Ask]) -> str:
    """Returns a name for what is asked: a run that goes on must have the same. How answers are scored is no part of it."""
    listed = [[ask.name, ask.text, [Path(name).name for name in ask.pictures]] for ask in asks]
    facts = json.dumps([settings.to_dict(), listed], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:24]
