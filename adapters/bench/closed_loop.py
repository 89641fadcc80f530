"""How well a model goes on with a text when it reads only what a router chooses. Prints nothing.

Shapes: B passages, T tokens of a continuation.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from oval_adapters.bench.closed_loop_prefill import FULL, Prefilled, Run, forward, runs
from oval_adapters.bench.recall import Tick, held_out_passages, silent
from oval_adapters.bench.recall_intervals import interval, mean_of_kinds
from oval_adapters.bench.recall_routers import contenders
from oval_adapters.bench.recall_values import MEAN, LoopRow, RecallSettings
from oval_core.metrics import RoutingCounters

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from oval_adapters.hf_cache import OvalCache

__all__ = ["measure_closed_loop", "num_loop_ticks"]


@dataclass(frozen=True, slots=True)
class _Decoded:
    """What one run gave: mean negative log likelihood of each passage, time of a forward, and what was read."""

    nll: tuple[float, ...]
    ms: float
    read_share: float
    summary_share: float
    tokens_read: float | None
    mass_recall: float | None


def measure_closed_loop(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: RecallSettings,
    tick: Tick | None = None,
) -> Iterator[LoopRow]:
    """Forces the continuations on the model, token by token, under every policy; yields rows kind by kind.

    The passages of a kind are the rows of one batch, and one prefill serves all policies. Last come rows of the kind
    `mean`.

    Args:
        model: not attached.
        tokenizer: the model's.
        settings: what to measure.
        tick: called after each forward.
    Raises:
        ConfigError: a text is too short, or a router does not fit the model.
    """
    tell = tick or silent
    wanted = runs(contenders(settings, model), settings)
    decoded: dict[str, dict[Run, _Decoded]] = {}
    for kind in settings.kinds:
        own = decoded.setdefault(kind, {})
        found = held_out_passages(tokenizer, settings, kind)
        prompt = torch.stack([p.prompt_ids for p in found]).to(model.device)
        text = torch.stack([p.continuation_ids for p in found]).to(model.device)
        tell(f"{kind}: reading {prompt.shape[1]} tokens", 0)
        with Prefilled.of(model, prompt, wanted, settings, text.shape[1]) as prefilled:
            for run in wanted:
                with prefilled.copy(run, settings) as (cache, counters):
                    own[run] = _decode(model, cache, text, counters, f"{kind}: {run.label}", tell)
                yield _row(kind, run, [own], settings)
    if len(decoded) > 1:
        for run in wanted:
            yield _row(MEAN, run, list(decoded.values()), settings)


def num_loop_ticks(model: PreTrainedModel, settings: RecallSettings) -> int:
    """Returns how far `measure_closed_loop` will move a bar."""
    count = len(runs(contenders(settings, model), settings))
    return len(settings.kinds) * count * (settings.steps - 1)


def _decode(
    model: PreTrainedModel,
    cache: OvalCache,
    text: torch.Tensor,
    counters: RoutingCounters,
    label: str,
    tell: Tick,
) -> _Decoded:
    """Feeds tokens [B, T] one by one. The first was foretold by the prefill, which is the same for all."""
    losses, times = [], []
    for step in range(text.shape[1] - 1):
        begin = time.perf_counter()
        logits = forward(model, cache, text[:, step : step + 1])
        times.append(1e3 * (time.perf_counter() - begin))
        losses.append(
            torch.nn.functional.cross_entropy(logits, text[:, step + 1], reduction="none")
        )
        tell(label, 1)
    present = counters.tokens_present
    return _Decoded(
        nll=tuple(torch.stack(losses).mean(0).tolist()),
        ms=statistics.median(times),
        read_share=counters.tokens_read / present if present else 1.0,
        summary_share=counters.summary_tokens / present if present else 0.0,
        tokens_read=_tokens_read(cache, counters),
        mass_recall=counters.audited_mass / counters.audits if counters.audits else None,
    )


def _tokens_read(cache: OvalCache, counters: RoutingCounters) -> float | None:
    layers = sum(cache.paged.policy.watches(layer) for layer in range(cache.num_layers))
    made = counters.selections * layers
    return counters.tokens_read / made if made else None


def _row(
    kind: str, run: Run, by_kind: Sequence[Mapping[Run, _Decoded]], settings: RecallSettings
) -> LoopRow:
    full = next(other for other in by_kind[0] if other.policy == FULL)
    found = [own[run] for own in by_kind]
    losses = [list(one.nll) for one in found]
    added = [
        [mine - whole for mine, whole in zip(own[run].nll, own[full].nll, strict=True)]
        for own in by_kind
    ]
    spread = interval(added, settings.seed)
    return LoopRow(
        signal=run.signal,
        policy=run.policy,
        kind=kind,
        lead=run.lead,
        budget=run.budget,
        perplexity=math.exp(mean_of_kinds(losses)),
        perplexity_ratio=math.exp(mean_of_kinds(added)),
        read_share=statistics.fmean(one.read_share for one in found),
        summary_share=statistics.fmean(one.summary_share for one in found),
        tokens_read_per_step=_mean([one.tokens_read for one in found]),
        mass_recall=_mean([one.mass_recall for one in found]),
        ms_per_token=round(statistics.fmean(one.ms for one in found), 3),
        passages=sum(len(own) for own in losses),
        perplexity_ratio_interval=spread and (math.exp(spread[0]), math.exp(spread[1])),
        log_perplexity_by_passage=tuple(value for own in losses for value in own),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
