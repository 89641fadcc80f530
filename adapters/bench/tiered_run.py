"""One prompt decoded on a new cache: its tokens, its time, and what moved between tiers meanwhile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch

from oval_adapters.attachment import attach
from oval_adapters.bench.machine import usable_cores
from oval_adapters.bench.memory import MemoryMeter
from oval_adapters.bench.prefetch_values import PrefetchSettings
from oval_core.config import OvalConfig, TierConfig
from oval_core.metrics import TierCounters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from oval_adapters.hf_cache import OvalCache

__all__ = ["Runner", "Tick", "TieredRun", "decode_threads"]

Tick = Callable[[str, int], None]
"""Told what runs, and how many forwards of it are done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TieredRun:
    """One cache's life: its new tokens, and what the timed steps took and moved."""

    tokens: tuple[int, ...]
    seconds: float
    moved: TierCounters
    peak_mb: float

    @property
    def compute_s(self) -> float:
        """Seconds of the timed steps in which no layer waited."""
        return self.seconds - self.moved.stall_s


class Runner:
    """Runs one prompt again and again, each time on a new cache of an attachment of its own."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: PrefetchSettings,
        ids: torch.Tensor,
        tick: Tick | None,
    ) -> None:
        self._model, self._settings = model, settings
        self._ids, self._tick = ids, tick

    def run(self, label: str, tiers: TierConfig | None) -> TieredRun:
        """Prefills and decodes; all that was opened is closed again."""
        settings, meter = self._settings, MemoryMeter(self._model.device)
        with torch.no_grad(), attach(self._model, OvalConfig(tiers=tiers)) as oval:
            counters = oval.counters.tiers
            meter.start()
            cache = oval.new_cache(self._ids.shape[1] + settings.warmup + settings.steps)
            with contextlib.closing(cache):
                token = self._prefill(label, cache)
                with _threads(decode_threads(settings, self._model.device)):
                    early = self._decode(cache, token, settings.warmup)
                    before, begin = replace(counters), self._now()
                    late = self._decode(cache, early[-1], settings.steps)
                    seconds = self._now() - begin
                moved = _difference(counters, before)
                meter.sample()
                peak_mb = meter.peak_mb()
            fetched = counters.bytes_used + counters.bytes_wasted
            assert counters.bytes_prefetched == fetched, "bytes were fetched and lost"
        self._tell(label, settings.warmup + settings.steps)
        return TieredRun(
            tokens=tuple(torch.cat(early + late[1:], 1)[0].tolist()),
            seconds=seconds,
            moved=moved,
            peak_mb=peak_mb,
        )

    def _prefill(self, label: str, cache: OvalCache) -> torch.Tensor:
        for chunk in self._ids.split(self._settings.chunk, dim=1):
            token = self._forward(cache, chunk)
            self._tell(label, 1)
        return token

    def _decode(self, cache: OvalCache, token: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Returns the token and those after it. Nothing else happens between the steps: the worker would run on."""
        tokens = [token]
        for _ in range(steps):
            tokens.append(self._forward(cache, tokens[-1]))
        return tokens

    def _forward(self, cache: OvalCache, ids: torch.Tensor) -> torch.Tensor:
        """Returns the greedy token [1, 1] after ids [1, T]."""
        output = self._model(ids, cache=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].argmax(-1, keepdim=True)

    def _tell(self, label: str, forwards: int) -> None:
        if self._tick is not None:
            self._tick(label, forwards)

    def _now(self) -> float:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        return time.perf_counter()


def decode_threads(settings: PrefetchSettings, device: torch.device) -> int:
    """Returns how many threads decode: on a CPU all cores but one, which moves pages, as a copy engine would."""
    if settings.threads is not None:
        return settings.threads
    return max(1, usable_cores() - 1) if device.type == "cpu" else torch.get_num_threads()


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _difference(now: TierCounters, before: TierCounters) -> TierCounters:
    names = [field.name for field in fields(TierCounters) if field.name != "peak_slow_bytes"]
    moved = {name: getattr(now, name) - getattr(before, name) for name in names}
    return TierCounters(**moved, peak_slow_bytes=now.peak_slow_bytes)
