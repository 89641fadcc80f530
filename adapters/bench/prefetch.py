"""What prefetching hides: decode steps with KV larger than fast memory, by what is fetched ahead. Prints nothing."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch

from oval_adapters.attachment import attach
from oval_adapters.bench.decode import positions
from oval_adapters.bench.machine import machine, usable_cores, versions
from oval_adapters.bench.memory import MemoryMeter
from oval_adapters.bench.prefetch_values import (
    MATCH,
    PrefetchReport,
    PrefetchRow,
    PrefetchSettings,
)
from oval_adapters.bench.prompts import long_text
from oval_adapters.bench.tier_facts import MODELLED_LINK, REAL_LINK, link_name
from oval_core.config import OvalConfig, TierConfig
from oval_core.errors import ConfigError, PromptTooLongError
from oval_core.metrics import TierCounters
from oval_core.tiers import check_tiers

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from oval_adapters.hf_cache import OvalCache

__all__ = ["check_settings", "decode_threads", "describe", "measure_prefetch", "num_ticks"]

Tick = Callable[[str, int], None]
"""Told what runs, and how many forwards of it are done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """One cache's life: its new tokens, and what the timed steps took and moved."""

    tokens: tuple[int, ...]
    seconds: float
    moved: TierCounters
    peak_mb: float

    @property
    def compute_s(self) -> float:
        return self.seconds - self.moved.stall_s


def measure_prefetch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: PrefetchSettings,
    tick: Tick | None = None,
) -> Iterator[PrefetchRow]:
    """Measures each context, size of fast memory and order, and yields its row as soon as it is there.

    A run prefills a new cache in chunks with all torch threads, then decodes greedily, one token a forward. Order
    `none` runs first, shown or not: what it computes is what the others are compared with.

    Args:
        model: not attached.
        tokenizer: makes the prompt, a diary.
        settings: what to measure.
        tick: called between what is timed, with a word on what runs and the forwards that are done.
    Raises:
        PromptTooLongError, ConfigError: the model has too few positions, or cannot run with so little fast memory.
    """
    check_settings(model.config, settings)
    for context in settings.contexts:
        ids = _prompt(tokenizer, settings.prompt_tokens(context)).to(model.device)
        bench = _Bench(model, settings, ids, tick)
        resident = [bench.run(f"{context} tokens, resident", None) for _ in range(settings.rounds)]
        for fast in settings.fast:
            tiers = settings.tiers(context, fast)
            label = f"{context} tokens, {tiers.fast_tokens} fast"
            if settings.link_gbps == MATCH:
                tiers = replace(tiers, link_gbps=bench.matching_gbps(f"{label}, match", tiers))
            for order, none, runs in bench.orders(label, tiers):
                yield _row(context, replace(tiers, prefetch=order), resident, none, runs)


def check_settings(config: PretrainedConfig, settings: PrefetchSettings) -> None:
    """Raises an error where a model cannot run this, before its weights are read.

    Raises:
        PromptTooLongError: the model has too few positions.
        ConfigError: too little fast memory for its layers, or the disk cannot be written.
    """
    limit, longest = positions(config), max(settings.contexts)
    if limit is not None and longest > limit:
        raise PromptTooLongError(
            f"context: got {longest} tokens. Allowed: {limit}, the positions of this model. Ask for fewer, or take a "
            "model with a longer context."
        )
    num_layers = config.get_text_config(decoder=True).num_hidden_layers
    for context in settings.contexts:
        for fast in settings.fast:
            check_tiers(OvalConfig(tiers=settings.tiers(context, fast)), num_layers)


def decode_threads(settings: PrefetchSettings, device: torch.device) -> int:
    """Returns how many threads decode: on a CPU all cores but one, which moves pages, as a copy engine would."""
    if settings.threads is not None:
        return settings.threads
    return max(1, usable_cores() - 1) if device.type == "cpu" else torch.get_num_threads()


def num_ticks(settings: PrefetchSettings) -> int:
    """Returns how many forwards `measure_prefetch` will tell `tick` of."""
    orders = len({"none", *settings.orders})
    probes = 1 if settings.link_gbps == MATCH else 0
    runs = settings.rounds + len(settings.fast) * (settings.rounds * orders + probes)
    decode = settings.warmup + settings.steps
    prompts = [settings.prompt_tokens(context) for context in settings.contexts]
    return runs * sum(-(-length // settings.chunk) + decode for length in prompts)


def describe(
    name: str, model: PreTrainedModel, settings: PrefetchSettings, rows: Sequence[PrefetchRow]
) -> PrefetchReport:
    """Puts rows and the circumstances of their measurement together."""
    with attach(model) as oval:
        stats = oval.stats()
    is_modelled = settings.link_gbps is not None or settings.link_latency_us > 0
    return PrefetchReport(
        rows=tuple(rows),
        model=name,
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        threads=decode_threads(settings, model.device),
        backend=stats["backend"],
        linears=stats["linears"],
        steps=settings.steps,
        warmup=settings.warmup,
        rounds=settings.rounds,
        chunk=settings.chunk,
        disk=settings.disk,
        direct_io=settings.direct_io,
        host_tokens=settings.host_tokens,
        link=MODELLED_LINK if is_modelled else REAL_LINK,
        link_latency_us=settings.link_latency_us,
        versions=versions(),
        machine=machine(model.device),
    )


class _Bench:
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

    def orders(
        self, label: str, tiers: TierConfig
    ) -> Iterator[tuple[str, Sequence[_Run], Sequence[_Run]]]:
        """Yields an order, the runs of order `none`, and its own, once it has run in all rounds."""
        runs: dict[str, list[_Run]] = {"none": []} | {name: [] for name in self._settings.orders}
        for number in range(1, self._settings.rounds + 1):
            # in turn: the machine's drift meets all of them
            for order, done in runs.items():
                title = f"{label}, {order}, round {number}/{self._settings.rounds}"
                done.append(self.run(title, replace(tiers, prefetch=order)))
                is_last = number == self._settings.rounds
                if is_last and order in self._settings.orders:
                    yield order, runs["none"], done

    def matching_gbps(self, label: str, tiers: TierConfig) -> float:
        """Returns the bandwidth at which moving a step's bytes takes as long as computing it."""
        latency_s = tiers.link_latency_us * 1e-6
        real = self.run(label, replace(tiers, link_latency_us=0.0))
        left = real.compute_s - real.moved.transfers * latency_s
        if not real.moved.bytes_demanded:
            raise ConfigError(
                f"link_gbps: got {MATCH}, and with {tiers.fast_tokens} fast tokens nothing has to move. Allowed: {MATCH} "
                "where something does. Choose a smaller --fast, or a number of GB/s."
            )
        if left <= 0:
            raise ConfigError(
                f"link_latency_us: got {tiers.link_latency_us:g}, and {real.moved.transfers} transfers of "
                f"{self._settings.steps} steps take longer by it alone than these compute ({real.compute_s:.3f} s). "
                f"Allowed with link_gbps {MATCH}: less. Choose a smaller latency."
            )
        return float(f"{real.moved.bytes_demanded / left / 1e9:.4g}")

    def run(self, label: str, tiers: TierConfig | None) -> _Run:
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
        return _Run(
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


def _row(
    context: int,
    tiers: TierConfig,
    resident: Sequence[_Run],
    none: Sequence[_Run],
    runs: Sequence[_Run],
) -> PrefetchRow:
    middle = statistics.median_low(run.seconds for run in runs)
    run = next(run for run in runs if run.seconds == middle)
    moved, compute_s = run.moved, statistics.median_low(run.compute_s for run in none)
    return PrefetchRow(
        context=context,
        order=tiers.prefetch,
        fast_fraction=round(tiers.fast_tokens / context, 4),
        fast_tokens=tiers.fast_tokens,
        link=link_name(tiers),
        link_gbps=tiers.link_gbps,
        total_s=round(run.seconds, 6),
        compute_s=round(compute_s, 6),
        resident_s=round(statistics.median_low(run.seconds for run in resident), 6),
        transfer_s=round(moved.transfer_s, 6),
        stall_s=round(moved.stall_s, 6),
        bytes_prefetched=moved.bytes_prefetched,
        bytes_used=moved.bytes_used,
        bytes_late=moved.bytes_late,
        bytes_wasted=moved.bytes_wasted,
        bytes_waiting=moved.bytes_prefetched - moved.bytes_used - moved.bytes_wasted,
        bytes_demanded=moved.bytes_demanded,
        lead_ms=round(1e3 * moved.lead_s / moved.leads, 3) if moved.leads else 0.0,
        identical=all(run.tokens == resident[0].tokens for run in runs),
        ratio=round(run.seconds / max(compute_s, moved.transfer_s), 4),
        peak_mb=round(max(run.peak_mb for run in runs), 1),
    )


def _prompt(tokenizer: PreTrainedTokenizerBase, length: int) -> torch.Tensor:
    """Returns token ids [1, length] of a diary, from its first day on again where it is too short."""
    text = long_text(max(1, length // 40))
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
    return ids.repeat(1, -(-length // ids.shape[1]))[:, :length]
