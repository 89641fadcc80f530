"""Figures of a side over units: pooled, medians, intervals. Knows rows only, not how they came."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from oval_adapters.evaluation.rows import Row, SideRow
from oval_adapters.evaluation.settings import PLAIN
from oval_spec.acceptance import AcceptanceCounters

__all__ = ["Parted", "Totals", "pooled", "totals"]

RESAMPLES = 2000
Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parted:
    """A text that is not plain decoding's.

    Attributes:
        name: of the prompt.
        category: of the prompt.
        step: number of the first token that differs, from 0.
        margin: see `Parting`.
    """

    name: str
    category: str
    step: int
    margin: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """What a side did over some units. What is not known, or does not exist for this side, is None.

    Attributes:
        prompts: prompts that were decoded.
        identical: texts that are plain decoding's, token for token; None where texts were sampled.
        tau: tokens a step, the target's own included: pooled over steps.
        tau_interval: 95 %, by drawing units anew.
        tau_p50: median over units.
        accepted_by_position: share of steps that accepted a token at each position, from 1.
        draft_acceptance_rate: accepted tokens over proposed ones.
        drafted_per_step: tokens that were proposed in a step, in the mean.
        steps: steps of all rows.
        new_tokens: tokens of all texts.
        tokens_per_s: tokens after the first of each text, over the seconds after the first forward.
        plain_tokens_per_s: of plain decoding, in the same run.
        speedup: of these two.
        speedup_interval: 95 %, by drawing units anew.
        speedup_p50: median over units.
        mean_speedup: mean over units of all tokens over all seconds, over plain decoding's mean (as Spec-Bench has it).
        whole_tokens_per_s: all tokens over all seconds, those of the prompt included.
        whole_speedup: of these.
        page_hit_rate: share of pages that were in fast memory when a layer asked; None without tiers.
        stall_s: seconds that layers waited for pages; None without tiers.
        plain_stall_s: of plain decoding.
        stall_hidden: share of the seconds of transfers in which no layer waited; None without any.
        partings: texts that are not plain decoding's.
    """

    prompts: int
    identical: int | None
    tau: float | None
    tau_interval: Interval | None
    tau_p50: float | None
    accepted_by_position: tuple[float, ...] | None
    draft_acceptance_rate: float | None
    drafted_per_step: float | None
    steps: int | None
    new_tokens: int
    tokens_per_s: float | None
    plain_tokens_per_s: float | None
    speedup: float | None
    speedup_interval: Interval | None
    speedup_p50: float | None
    mean_speedup: float | None
    whole_tokens_per_s: float | None
    whole_speedup: float | None
    page_hit_rate: float | None
    stall_s: float | None
    plain_stall_s: float | None
    stall_hidden: float | None
    partings: tuple[Parted, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, ready for JSON."""
        return asdict(self)


def totals(rows: Sequence[Row], label: str, seed: int = 0) -> Totals:
    """Returns the figures of a side over units of any category.

    Args:
        rows: at least one.
        label: of the side.
        seed: of the intervals.
    """
    own, plain = [row.sides[label] for row in rows], [row.sides[PLAIN] for row in rows]
    counts = pooled([side.counts for side in own])
    speed, plain_speed = _decode_speed(own), _decode_speed(plain)
    whole, plain_whole = _whole_speed(own), _whole_speed(plain)
    means = [statistics.fmean(_whole_speed([side]) or 0.0 for side in some) for some in (own, plain)]  # fmt: skip
    taus = [_ratio(side.counts.emitted, side.counts.steps) for side in own if side.counts]
    ratios = [_over(_decode_speed([a]), _decode_speed([b])) for a, b in zip(own, plain, strict=True)]  # fmt: skip
    partings = tuple(_parted(rows, label))
    compared = bool(own[0].partings)
    prompts = sum(len(side.ids) for side in own)
    return Totals(
        prompts=prompts,
        identical=prompts - len(partings) if compared else None,
        tau=counts and _ratio(counts.emitted, counts.steps),
        tau_interval=counts and _interval(own, seed, _emitted, _steps),
        tau_p50=_median(taus),
        accepted_by_position=counts and tuple(counts.accepted_by_position),
        draft_acceptance_rate=counts and _ratio(counts.accepted, counts.drafted),
        drafted_per_step=counts and _ratio(counts.drafted, counts.steps),
        steps=counts and counts.steps,
        new_tokens=sum(side.new_tokens for side in own),
        tokens_per_s=speed,
        plain_tokens_per_s=plain_speed,
        speedup=_over(speed, plain_speed),
        speedup_interval=_speedup_interval(own, plain, seed),
        speedup_p50=_median(ratios),
        mean_speedup=_ratio(*means),
        whole_tokens_per_s=whole,
        whole_speedup=_over(whole, plain_whole),
        page_hit_rate=_hit_rate(own),
        stall_s=_stall(own),
        plain_stall_s=_stall(plain),
        stall_hidden=_hidden(own),
        partings=partings,
    )


def pooled(counts: Sequence[AcceptanceCounters | None]) -> AcceptanceCounters | None:
    """Returns the sum; None where no draft was verified."""
    total = AcceptanceCounters()
    for own in counts:
        if own is not None:
            total.merge(own)
    return total if total.steps else None


def _parted(rows: Sequence[Row], label: str) -> list[Parted]:
    return [
        Parted(name=name, category=row.category, step=parting.step, margin=parting.margin)
        for row in rows
        for name, parting in zip(row.names, row.sides[label].partings, strict=False)
        if parting is not None
    ]


def _decode_speed(sides: Sequence[SideRow]) -> float | None:
    return _ratio(sum(side.decoded_tokens for side in sides), sum(side.decode_s for side in sides))


def _whole_speed(sides: Sequence[SideRow]) -> float | None:
    seconds = sum(side.prompt_s + side.decode_s for side in sides)
    return _ratio(sum(side.new_tokens for side in sides), seconds)


def _hit_rate(sides: Sequence[SideRow]) -> float | None:
    shares = [side.tiers for side in sides if side.tiers is not None]
    asked = sum(own["asked"] for own in shares)
    return _ratio(sum(own["found"] for own in shares), asked) if shares else None


def _stall(sides: Sequence[SideRow]) -> float | None:
    known = [side.tiers["stall_s"] for side in sides if side.tiers is not None]
    return sum(known) if known else None


def _hidden(sides: Sequence[SideRow]) -> float | None:
    known = [side.tiers for side in sides if side.tiers is not None]
    waited = _ratio(sum(own["stall_s"] for own in known), sum(own["transfer_s"] for own in known))
    return None if waited is None else 1 - waited


def _emitted(side: SideRow) -> float:
    return side.counts.emitted if side.counts else 0.0


def _steps(side: SideRow) -> float:
    return side.counts.steps if side.counts else 0.0


def _interval(
    sides: Sequence[SideRow],
    seed: int,
    above: Callable[[SideRow], float],
    below: Callable[[SideRow], float],
) -> Interval | None:
    sums = _resampled([[above(side), below(side)] for side in sides], seed)
    return None if sums is None else _quantiles(sums[:, 0] / sums[:, 1])


def _speedup_interval(
    own: Sequence[SideRow], plain: Sequence[SideRow], seed: int
) -> Interval | None:
    pairs = zip(own, plain, strict=True)
    sums = _resampled([[a.decoded_tokens, a.decode_s, b.decoded_tokens, b.decode_s] for a, b in pairs], seed)  # fmt: skip
    return None if sums is None else _quantiles(sums[:, 0] / sums[:, 1] / sums[:, 2] * sums[:, 3])


def _resampled(values: list[list[float]], seed: int) -> torch.Tensor | None:
    """Returns sums [RESAMPLES, columns] over units drawn anew; None for one unit, which tells nothing of others."""
    if len(values) < 2:
        return None
    generator = torch.Generator().manual_seed(seed)
    table = torch.tensor(values, dtype=torch.float64)
    drawn = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
    return table[drawn].sum(1)


def _quantiles(values: torch.Tensor) -> Interval | None:
    known = values[values.isfinite()]
    if not len(known):
        return None
    low, high = known.quantile(known.new_tensor([0.025, 0.975])).tolist()
    return low, high


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None


def _over(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
