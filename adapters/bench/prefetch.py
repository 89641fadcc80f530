"""What prefetching hides: decode steps with KV larger than fast memory, by what is fetched ahead. Prints nothing."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from oval_adapters.attachment import attach
from oval_adapters.bench.decode import positions
from oval_adapters.bench.machine import machine, versions
from oval_adapters.bench.prefetch_values import (
    MATCH,
    PrefetchReport,
    PrefetchRow,
    PrefetchSettings,
)
from oval_adapters.bench.prompts import long_text
from oval_adapters.bench.tier_facts import MODELLED_LINK, REAL_LINK, link_name
from oval_adapters.bench.tiered_run import Runner, Tick, TieredRun, decode_threads
from oval_core.config import OvalConfig, TierConfig
from oval_core.errors import ConfigError, PromptTooLongError
from oval_core.tiers import check_tiers

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["check_settings", "describe", "measure_prefetch", "num_ticks"]


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
        runner = Runner(model, settings, ids, tick)
        title = f"{context} tokens, resident"
        resident = [runner.run(title, None) for _ in range(settings.rounds)]
        for fast in settings.fast:
            tiers = settings.tiers(context, fast)
            label = f"{context} tokens, {tiers.fast_tokens} fast"
            if settings.link_gbps == MATCH:
                gbps = _matching_gbps(runner, settings.steps, f"{label}, match", tiers)
                tiers = replace(tiers, link_gbps=gbps)
            for order, none, runs in _in_turn(runner, settings, label, tiers):
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


def _in_turn(
    runner: Runner, settings: PrefetchSettings, label: str, tiers: TierConfig
) -> Iterator[tuple[str, Sequence[TieredRun], Sequence[TieredRun]]]:
    """Yields an order, the runs of order `none`, and its own, once it has run in all rounds."""
    runs: dict[str, list[TieredRun]] = {"none": []} | {name: [] for name in settings.orders}
    for number in range(1, settings.rounds + 1):
        # in turn: the machine's drift meets all of them
        for order, done in runs.items():
            title = f"{label}, {order}, round {number}/{settings.rounds}"
            done.append(runner.run(title, replace(tiers, prefetch=order)))
            if number == settings.rounds and order in settings.orders:
                yield order, runs["none"], done


def _matching_gbps(runner: Runner, steps: int, label: str, tiers: TierConfig) -> float:
    """Returns the bandwidth at which moving the bytes of the steps takes as long as computing them."""
    real = runner.run(label, replace(tiers, link_latency_us=0.0))
    left = real.compute_s - real.moved.transfers * tiers.link_latency_us * 1e-6
    if not real.moved.bytes_demanded:
        raise ConfigError(
            f"link_gbps: got {MATCH}, and with {tiers.fast_tokens} fast tokens nothing has to move. Allowed: {MATCH} "
            "where something does. Choose a smaller --fast, or a number of GB/s."
        )
    if left <= 0:
        raise ConfigError(
            f"link_latency_us: got {tiers.link_latency_us:g}, and {real.moved.transfers} transfers of {steps} steps "
            f"take longer by it alone than the steps compute ({real.compute_s:.3f} s). Allowed with link_gbps "
            f"{MATCH}: less. Choose a smaller latency."
        )
    return float(f"{real.moved.bytes_demanded / left / 1e9:.4g}")


def _row(
    context: int,
    tiers: TierConfig,
    resident: Sequence[TieredRun],
    none: Sequence[TieredRun],
    runs: Sequence[TieredRun],
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
        bytes_waiting_growth=moved.bytes_prefetched - moved.bytes_used - moved.bytes_wasted,
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
