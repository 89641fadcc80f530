"""One side decodes one unit, with a clock. Knows how `generate` is called for each side, not what is made of it."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from oval_adapters.evaluation.rows import SideRow
from oval_adapters.evaluation.settings import HF, AcceptanceSettings, Side
from oval_adapters.evaluation.units import Unit
from oval_spec.acceptance import AcceptanceCounters

if TYPE_CHECKING:
    from oval_adapters.attachment import Attachment
    from oval_adapters.hf_cache import OvalCache
    from oval_core.metrics import StepMetrics

__all__ = ["PageWatch", "StepClock", "decode", "difference", "end_ids", "pad_id"]


class PageWatch:
    """Adds up what the forwards after the prompt's found in fast memory, and how long they waited.

    Args:
        oval: whose totals tell seconds.
        cache: of the text, on tiers.
    """

    def __init__(self, oval: Attachment, cache: OvalCache) -> None:
        self._totals, self._cache = oval.counters.tiers, cache
        self._begin = replace(self._totals)
        self._seen: StepMetrics | None = None
        self._hits = self._misses = 0

    def look(self, *, begins: bool = False) -> None:
        """Takes in the last forward, once; `begins`: it was the prompt's, and counts for nothing."""
        step = self._cache.last_step
        if step is not None and step is not self._seen and not begins:
            self._hits += sum(step.hits.values())
            self._misses += sum(step.misses.values())
        if begins:
            self._begin = replace(self._totals)
        self._seen = step

    def to_dict(self) -> dict[str, float]:
        """Returns pages asked for and found, and seconds of waiting and of transfers."""
        return {
            "asked": self._hits + self._misses,
            "found": self._hits,
            "stall_s": self._totals.stall_s - self._begin.stall_s,
            "transfer_s": self._totals.transfer_s - self._begin.transfer_s,
        }


class StepClock:
    """A streamer that counts which tokens came together, and notes when the prompt's forward ended.

    Tokens came together if no forward of the model lies between them. Use it as a context manager around `generate`.
    """

    def __init__(self, model: Any, pages: PageWatch | None = None) -> None:
        self._decoder, self._device, self._pages = model.get_decoder(), model.device, pages
        self._forwards, self._last = 0, 0
        self._prompt_came = False
        self._begin = self._prompt_end = self._end = 0.0
        self.arrivals: list[int] = []

    def __enter__(self) -> StepClock:
        self._hook = self._decoder.register_forward_hook(self._count)
        self._begin = self._now()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end = self._now()
        self._hook.remove()
        if self._pages is not None:
            self._pages.look()

    @property
    def prompt_s(self) -> float:
        """Seconds to the end of the first forward."""
        return self._prompt_end - self._begin

    @property
    def decode_s(self) -> float:
        """Seconds after it."""
        return self._end - self._prompt_end

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt first, then tokens: a column a call."""
        if not self._prompt_came:
            self._prompt_came = True
            return
        if self._forwards == self._last and self.arrivals:
            self.arrivals[-1] += 1
        else:
            self.arrivals.append(1)
        self._last = self._forwards

    def end(self) -> None:
        """Does nothing."""

    def _count(self, *_: object) -> None:
        self._forwards += 1
        if self._forwards == 1:
            self._prompt_end = self._now()
        if self._pages is not None:
            self._pages.look(begins=self._forwards == 1)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def decode(oval: Attachment, side: Side, unit: Unit, settings: AcceptanceSettings) -> SideRow:
    """Decodes a unit.

    Args:
        oval: the attached model; a side that is Hugging Face runs beside it.
        side: how.
        unit: what.
        settings: tokens an answer, sampling.
    """
    model, options = oval.model, _options(oval, side, settings)
    inputs = unit.inputs(pad_id(model), model.device)
    width, ends = inputs["input_ids"].shape[1], end_ids(model)
    before = _counts(oval, side)
    pages = None
    with contextlib.ExitStack() as stack:
        if oval.config.tiers is not None and side.label != HF:
            cache = oval.new_cache(width + settings.max_new_tokens)
            stack.callback(cache.close)
            pages, options["cache"] = PageWatch(oval, cache), cache
        torch.manual_seed(settings.seed + unit.number)
        with StepClock(model, pages) as clock:
            output = model.generate(**inputs, **options, streamer=clock)
    ids = tuple(_to_end(row, ends) for row in output[:, width:].tolist())
    after = _counts(oval, side)
    return SideRow(
        ids=ids,
        prompt_s=clock.prompt_s,
        decode_s=clock.decode_s,
        counts=None if before is None or after is None else difference(after, before),
        arrivals=tuple(clock.arrivals) if len(ids) == 1 else None,
        tiers=None if pages is None else pages.to_dict(),
    )


def difference(after: AcceptanceCounters, before: AcceptanceCounters) -> AcceptanceCounters:
    """Returns what was counted between two readings of the same totals."""
    return AcceptanceCounters(
        drafted=after.drafted - before.drafted,
        accepted_counts=_less(after.accepted_counts, before.accepted_counts),
        emitted_histogram=_less(after.emitted_histogram, before.emitted_histogram),
    )


def end_ids(model: Any) -> tuple[int, ...]:
    """Returns the tokens that end a text."""
    ends = model.generation_config.eos_token_id
    return () if ends is None else tuple(ends) if isinstance(ends, list | tuple) else (int(ends),)


def pad_id(model: Any) -> int:
    """Returns the token that fills batches: the model's own, else an end token, else 0; masked in any case."""
    pad = model.generation_config.pad_token_id
    return int(pad) if pad is not None else next(iter(end_ids(model)), 0)


def _options(oval: Attachment, side: Side, settings: AcceptanceSettings) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_new_tokens": settings.max_new_tokens,
        "do_sample": not settings.is_greedy,
        "pad_token_id": pad_id(oval.model),
    }
    if not settings.is_greedy:
        options["temperature"] = settings.temperature
    if side.settings is not None:
        options |= {"custom_generate": oval.speculative, "speculation": dict(side.settings)}
    if side.label == HF:
        options["use_oval"] = False
    return options


def _counts(oval: Attachment, side: Side) -> AcceptanceCounters | None:
    """Returns the attachment's totals; None where nothing is drafted."""
    if side.settings is None:
        return None
    counted = oval.stats().get("speculation")
    return AcceptanceCounters() if counted is None else AcceptanceCounters.from_dict(counted)


def _less(after: list[int], before: list[int]) -> list[int]:
    left = [n - (before[i] if i < len(before) else 0) for i, n in enumerate(after)]
    while left and not left[-1]:
        left.pop()  # positions that other texts reached
    return left


def _to_end(ids: list[int], ends: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a text up to its end token; what follows is padding."""
    for place, token in enumerate(ids):
        if token in ends:
            return tuple(ids[: place + 1])
    return tuple(ids)
