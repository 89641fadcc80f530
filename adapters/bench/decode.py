"""Time and memory of decoding: Hugging Face's cache and OVAL's in turn, in one process. Prints nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import DynamicCache

from oval_adapters.attachment import attach
from oval_adapters.bench.machine import machine, versions
from oval_adapters.bench.memory import MemoryMeter
from oval_adapters.bench.tier_facts import tier_facts
from oval_adapters.bench.values import DecodeReport, DecodeRow, DecodeSettings, Run
from oval_core.config import OvalConfig
from oval_core.errors import ConfigError, PromptTooLongError

if TYPE_CHECKING:
    from transformers import Cache, PretrainedConfig, PreTrainedModel

__all__ = ["check_settings", "describe", "measure_decode", "num_ticks", "positions"]

_HF, _OVAL = "hf", "oval"

Tick = Callable[[str], None]


def measure_decode(
    model: PreTrainedModel, settings: DecodeSettings, tick: Tick | None = None
) -> Iterator[DecodeRow]:
    """Measures each context and yields its row as soon as it is there.

    A round is a turn of Hugging Face (`DynamicCache`, the model as it was loaded) and a turn of OVAL: the
    machine's drift meets both. A turn prefills in chunks, then decodes greedily, one token a forward.

    Args:
        model: not attached; load it with attention `sdpa` to compare with Hugging Face's best.
        settings: what to measure.
        tick: called after each forward, outside of what is timed, with a word on what runs.
    Raises:
        PromptTooLongError, ConfigError: the model has too few positions.
        BackendUnavailableError: the backend or the linear layers that were asked for cannot run here.
    """
    check_settings(model.config, settings)
    attach(
        model, _config(settings)
    ).detach()  # what cannot run here is refused before time is spent
    _touch_weights(model)
    for context in settings.contexts:
        ids = _token_ids(model, prompt_tokens(model.config, settings, context), settings.seed)
        runs: dict[str, list[Run]] = {_HF: [], _OVAL: []}
        for number in range(settings.rounds):
            for side, take_turn in ((_HF, _hf_turn), (_OVAL, _oval_turn)):
                label = f"{context} tokens, round {number + 1}/{settings.rounds}, {side}"
                watch = _Watch(model, settings, label, tick)
                with torch.no_grad():
                    runs[side].append(take_turn(model, ids, settings, watch))
        yield _row(context, ids.shape[1], runs[_HF], runs[_OVAL])


def check_settings(config: PretrainedConfig, settings: DecodeSettings) -> None:
    """Raises `PromptTooLongError` or `ConfigError` where the model has too few positions."""
    limit = positions(config)
    longest, decode = max(settings.contexts), settings.warmup + settings.steps
    if limit is not None and longest > limit:
        raise PromptTooLongError(
            f"context: got {longest} tokens. Allowed: {limit}, the positions of this model. Leave it out, or "
            "take a model with a longer context."
        )
    if limit is not None and decode >= limit:
        raise ConfigError(
            f"steps: got {decode}, warm-up included. Allowed: fewer than {limit}, the positions of this model. "
            "Ask for fewer."
        )


def prompt_tokens(config: PretrainedConfig, settings: DecodeSettings, context: int) -> int:
    """Returns how many tokens are prefilled so that every decode step has a position of the model."""
    limit = positions(config)
    return context if limit is None else min(context, limit - settings.warmup - settings.steps)


def num_ticks(config: PretrainedConfig, settings: DecodeSettings) -> int:
    """Returns how often `measure_decode` will call `tick`."""
    prompts = [prompt_tokens(config, settings, context) for context in settings.contexts]
    chunks = sum(-(-length // settings.chunk) for length in prompts)
    decode = len(prompts) * (settings.warmup + settings.steps)
    return 2 * settings.rounds * (chunks + decode)


def describe(
    name: str, model: PreTrainedModel, settings: DecodeSettings, rows: Sequence[DecodeRow]
) -> DecodeReport:
    """Puts rows and the circumstances of their measurement together."""
    with attach(model, _config(settings)) as oval:
        stats = oval.stats()
    return DecodeReport(
        rows=tuple(rows),
        model=name,
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        threads=torch.get_num_threads(),
        backend=stats["backend"],
        linears=stats["linears"],
        steps=settings.steps,
        warmup=settings.warmup,
        rounds=settings.rounds,
        chunk=settings.chunk,
        tiers=tier_facts(settings.tiers),
        versions=versions(),
        machine=machine(model.device),
    )


def _touch_weights(model: PreTrainedModel) -> None:
    """Runs two small forwards: the first turn must not pay for weights that were never read from the disk."""
    with torch.no_grad():
        for length in (8, 1):
            model(_token_ids(model, length, 0), use_cache=False)


class _Watch:
    """Times forwards one by one, samples memory between them, and says that one is done."""

    def __init__(
        self, model: PreTrainedModel, settings: DecodeSettings, label: str, tick: Tick | None
    ) -> None:
        self._model, self._settings = model, settings
        self._label, self._tick = label, tick
        self.meter = MemoryMeter(model.device)

    def forward(self, ids: torch.Tensor, cache: Cache) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Runs one forward; returns its last logits [1, V], the greedy token [1, 1] and the seconds of both."""
        begin = self._now()
        logits = self._model(ids, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        token = logits.argmax(-1, keepdim=True)
        seconds = self._now() - begin
        self.meter.sample()
        if self._tick is not None:
            self._tick(self._label)
        return logits, token, seconds

    def turn(self, ids: torch.Tensor, cache: Cache, kv_bytes: Callable[[], int]) -> Run:
        """Prefills and decodes on an empty cache; the meter must have been started."""
        settings, prefill_s = self._settings, 0.0
        for chunk in ids.split(settings.chunk, dim=1):
            first_logits, token, seconds = self.forward(chunk, cache)
            prefill_s += seconds
        times = []
        for _ in range(settings.warmup + settings.steps):
            _, token, seconds = self.forward(token, cache)
            times.append(seconds * 1e3)
        return Run(
            prefill_s=prefill_s,
            step_ms=tuple(times[settings.warmup :]),
            kv_bytes=kv_bytes(),
            peak_mb=self.meter.peak_mb(),
            first_logits=first_logits[0].float().cpu(),
        )

    def _now(self) -> float:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        return time.perf_counter()


def _hf_turn(
    model: PreTrainedModel, ids: torch.Tensor, settings: DecodeSettings, watch: _Watch
) -> Run:
    watch.meter.start()
    cache = DynamicCache(config=model.config)
    return watch.turn(ids, cache, lambda: _tensor_bytes(cache))


def _oval_turn(
    model: PreTrainedModel, ids: torch.Tensor, settings: DecodeSettings, watch: _Watch
) -> Run:
    # attached for this turn only: Hugging Face's turns run on an untouched model
    with attach(model, _config(settings)) as oval:
        watch.meter.start()
        cache = oval.new_cache(ids.shape[1] + settings.warmup + settings.steps)
        with contextlib.closing(cache):
            return watch.turn(ids, cache, lambda: cache.paged.bytes_allocated)


def _config(settings: DecodeSettings) -> OvalConfig:
    return OvalConfig(backend=settings.backend, linears=settings.linears, tiers=settings.tiers)


def _tensor_bytes(cache: DynamicCache) -> int:
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))


def _row(context: int, length: int, hf: Sequence[Run], oval: Sequence[Run]) -> DecodeRow:
    hf_p50, hf_p99 = _percentiles(hf)
    oval_p50, oval_p99 = _percentiles(oval)
    diff = max(
        float((a.first_logits - b.first_logits).abs().max()) for a, b in zip(hf, oval, strict=True)
    )
    return DecodeRow(
        context=context,
        prompt_tokens=length,
        hf_ms_p50=round(hf_p50, 3),
        hf_ms_p99=round(hf_p99, 3),
        oval_ms_p50=round(oval_p50, 3),
        oval_ms_p99=round(oval_p99, 3),
        ratio=round(oval_p50 / hf_p50, 4),
        hf_prefill_s=round(float(np.median([run.prefill_s for run in hf])), 3),
        oval_prefill_s=round(float(np.median([run.prefill_s for run in oval])), 3),
        kv_bytes=hf[0].kv_bytes,
        oval_kv_bytes_allocated=max(run.kv_bytes for run in oval),
        hf_rss_mb=round(max(run.peak_mb for run in hf), 1),
        oval_rss_mb=round(max(run.peak_mb for run in oval), 1),
        max_logit_diff=round(diff, 6),
    )


def _percentiles(runs: Sequence[Run]) -> tuple[float, float]:
    times = [ms for run in runs for ms in run.step_ms]
    return float(np.percentile(times, 50)), float(np.percentile(times, 99))


def _token_ids(model: PreTrainedModel, length: int, seed: int) -> torch.Tensor:
    """Returns token ids [1, length] as uneven as those of a text: log-uniform over the vocabulary."""
    vocab = model.config.get_text_config(decoder=True).vocab_size
    uniform = torch.rand(1, length, generator=torch.Generator().manual_seed(seed))
    return (vocab**uniform).long().clamp(max=vocab - 1).to(model.device)


def positions(config: PretrainedConfig) -> int | None:
    """Returns how many positions the model has; None where its config does not say."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
