"""What the order of page fusion hides of the transfers: the same text and drafts, verified once by each order. Prints nothing."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch

from oval_adapters.attachment import attach
from oval_adapters.bench.fusion_chain import ChainRun, Replay, decode_chains, prefill
from oval_adapters.bench.fusion_values import (
    DEMAND,
    FusionDrafts,
    FusionReport,
    FusionRow,
    FusionSettings,
)
from oval_adapters.bench.machine import machine, versions
from oval_adapters.bench.prompts import long_text
from oval_adapters.bench.tier_facts import MODELLED_LINK
from oval_adapters.speculative.page_fusion import FusionCounters, PageFusion
from oval_adapters.speculative.self_draft import SelfDrafter, watched_cache
from oval_core.config import OvalConfig, TierConfig
from oval_core.metrics import TierCounters
from oval_core.routing.foresight import reads_hidden
from oval_core.speculation_config import SpeculationConfig
from oval_core.tiers.prepare import expect
from oval_core.values import PageSelection

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from oval_adapters.attachment import Attachment
    from oval_adapters.hf_cache import OvalCache
    from oval_core.routing.routed import RoutedPolicy
    from oval_spec.drafter import Draft, Drafter

__all__ = ["describe", "measure_fusion", "num_ticks"]

Tick = Callable[[str, int], None]
"""Told what runs, and how many runs are done."""

_FULL = "full"


@dataclass(frozen=True, slots=True)
class _Tiered:
    """One replay: what it decoded, what it moved, and what fusion did before its verifications."""

    run: ChainRun
    moved: TierCounters
    fusion: FusionCounters
    prepare_s: float
    resident_share: float


def measure_fusion(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: FusionSettings,
    tick: Tick | None = None,
) -> Iterator[tuple[FusionDrafts, list[FusionRow]]]:
    """Yields the drafts and the rows of each policy.

    Drafts are made once a policy, with everything in fast memory; each order then replays them from a copy of one
    prefilled cache, and waits as long as the drafts took.

    Args:
        model: not attached.
        tokenizer: makes the prompt, a diary.
        settings: what to measure.
        tick: called after each run.
    Raises:
        ConfigError: too little fast memory, or a router or heads that do not fit the model.
    """
    tell = tick or (lambda _label, _done: None)
    ids = _prompt(tokenizer, settings.context).to(model.device)
    chunk = _chunk(model, settings)
    for policy in settings.policies:
        with _opened(model, policy, settings, None) as (oval, cache):
            first, hidden = prefill(model, cache, ids, chunk)
            text = [*ids[0].tolist(), first]
            drafter = _drafter(oval, cache, settings)
            resident = decode_chains(
                model, cache, text, hidden, drafter, settings.new_tokens, settings.depth
            )
            reads = reads_hidden(cast("RoutedPolicy", cache.paged.policy))
        tell(f"{policy}: drafts", 1)
        with _opened(model, policy, settings, settings.tiers()) as (oval, cache):
            first, hidden = prefill(model, cache, ids, chunk)
            tell(f"{policy}: prompt under tiers", 1)
            found: dict[str, list[_Tiered]] = {order: [] for order in settings.orders}
            for _ in range(settings.rounds):
                for order, done in found.items():  # in turn: the machine's drift meets all
                    text = [*ids[0].tolist(), first]
                    done.append(_replay(oval, cache, text, hidden, order, resident, settings))
                    tell(f"{policy}: {order}", 1)
        rows = [_row(policy, order, done, resident, settings) for order, done in found.items()]
        yield _drafts(policy, settings, resident, reads), rows


def num_ticks(settings: FusionSettings) -> int:
    """Returns how far `measure_fusion` will move a bar."""
    return len(settings.policies) * (2 + settings.rounds * len(settings.orders))


def findings(rows: Sequence[FusionRow]) -> tuple[str, ...]:
    """Returns what the rows say of each order against what the tiers do by themselves, gains and losses alike."""
    said = []
    for policy in dict.fromkeys(row.policy for row in rows):
        own = {row.order: row for row in rows if row.policy == policy}
        base = own.get("none")
        if base is None:
            continue
        for order, row in own.items():
            if order in ("none", DEMAND):
                continue
            less = base.waiting_ms - row.waiting_ms
            verdict = "less" if less > 0 else "more"
            said.append(
                f"{policy}, {order}: waits {abs(less):.1f} ms a step {verdict} than without fusion "
                f"({row.waiting_ms:.1f} against {base.waiting_ms:.1f}; hit rate {row.hit_rate:.1%} against "
                f"{base.hit_rate:.1%}); predicting takes {row.prepare_ms:.1f} ms"
            )
    return tuple(said)


def describe(
    name: str,
    model: PreTrainedModel,
    settings: FusionSettings,
    rows: Sequence[FusionRow],
    drafts: Sequence[FusionDrafts],
) -> FusionReport:
    """Puts rows and the circumstances of their measurement together."""
    return FusionReport(
        rows=tuple(rows),
        drafts=tuple(drafts),
        findings=findings(rows),
        model=name,
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        threads=torch.get_num_threads(),
        link=MODELLED_LINK,
        settings=settings,
        versions=versions(),
        machine=machine(model.device),
    )


def _chunk(model: PreTrainedModel, settings: FusionSettings) -> int:
    """Returns tokens a forward of the prefill that fit under tiers: what a policy remembers depends on the pieces."""
    with _opened(model, _FULL, settings, settings.tiers()) as (_, cache):
        limit = cache.max_new_tokens(1)
    assert limit is not None, "tiers limit it"
    return min(settings.chunk, limit)


@contextlib.contextmanager
def _opened(
    model: PreTrainedModel, policy: str, settings: FusionSettings, tiers: TierConfig | None
) -> Iterator[tuple[Attachment, OvalCache]]:
    routing = settings.routing()
    config = OvalConfig(policy=policy, tiers=tiers, routing=None if policy == _FULL else routing)
    room = settings.context + settings.new_tokens + settings.depth
    with attach(model, config) as oval:
        cache = watched_cache(oval, routing, reserve_tokens=room)
        with contextlib.closing(cache):
            yield oval, cache


def _drafter(oval: Attachment, cache: OvalCache, settings: FusionSettings) -> Drafter:
    config = SpeculationConfig(
        drafter=settings.drafter,
        heads=settings.heads,
        depth=settings.depth,
        self_budget=settings.self_budget,
    )
    if settings.drafter == SelfDrafter.name:
        drafter = SelfDrafter(oval, config, settings.routing())
        drafter.bind(cache)
        return drafter
    from oval_adapters.speculative.drafters import create_drafter

    return create_drafter(oval, config).drafter


def _replay(
    oval: Attachment,
    prefilled: OvalCache,
    text: Sequence[int],
    hidden: torch.Tensor,
    order: str,
    record: ChainRun,
    settings: FusionSettings,
) -> _Tiered:
    with contextlib.closing(prefilled.copy()) as cache:
        tiers = cache.paged.tiers
        assert tiers is not None, "measured under tiers"
        counters, prepare_s, shares = oval.counters.tiers, 0.0, []
        fusion = None if order == DEMAND else PageFusion(cache, order, None, settings.most_pages)
        if fusion is None:
            cache.paged.foresees = False

        def before(draft: Draft) -> None:
            nonlocal prepare_s
            begin = time.perf_counter()
            if fusion is None:
                expect(tiers, PageSelection((((),),), dict.fromkeys(tiers.layers, 0)))
            else:
                fusion.prepare([draft])
            prepare_s += time.perf_counter() - begin
            shares.append(_resident_share(cache))

        earlier = replace(counters)
        run = decode_chains(
            oval.model,
            cache,
            text,
            hidden,
            Replay(record.steps),
            settings.new_tokens,
            settings.depth,
            before,
        )
        cache.paged.rest()
        moved = _difference(counters, earlier)
    done = FusionCounters() if fusion is None else fusion.counters
    return _Tiered(run, moved, done, prepare_s, statistics.fmean(shares))


def _resident_share(cache: OvalCache) -> float:
    """Returns the share of the pages that a verification is taken to read which have a place in the pool."""
    paged = cache.paged
    assert paged.tiers is not None, "measured under tiers"
    chosen = paged.policy.foresee(paged.table.sequences)
    here = paged.tiers.residency.page_ids
    if chosen is None:
        wanted = [page.page_id for page in paged.table.pages()]
    else:
        wanted = [p.page_id for rows in chosen.groups for own in rows for p in own or ()]
    return sum(page_id in here for page_id in wanted) / max(1, len(wanted))


def _difference(now: TierCounters, before: TierCounters) -> TierCounters:
    earlier = before.to_dict()
    return TierCounters(**{name: value - earlier[name] for name, value in now.to_dict().items()})  # type: ignore[arg-type]


def _row(
    policy: str,
    order: str,
    done: Sequence[_Tiered],
    resident: ChainRun,
    settings: FusionSettings,
) -> FusionRow:
    middle = statistics.median_low(one.moved.stall_s for one in done)
    one = next(own for own in done if own.moved.stall_s == middle)
    steps, moved = len(one.run.steps), one.moved
    metrics = [step.moved for step in one.run.steps if step.moved is not None]
    hits = sum(sum(own.hits.values()) for own in metrics)
    misses = sum(sum(own.misses.values()) for own in metrics)
    return FusionRow(
        policy=policy,
        order=order,
        steps=steps,
        stall_ms=round(1e3 * moved.stall_s / steps, 3),
        promotion_ms=round(1e3 * moved.promotion_s / steps, 3),
        prepare_ms=round(1e3 * one.prepare_s / steps, 3),
        verify_ms=round(1e3 * statistics.fmean(step.verify_s for step in one.run.steps), 3),
        resident_share=round(one.resident_share, 4),
        hit_rate=round(hits / max(1, hits + misses), 4),
        predicted=round(one.fusion.predicted / steps, 2),
        common=round(one.fusion.common / steps, 2),
        promoted=round(one.fusion.promoted / steps, 2),
        bytes_prefetched=moved.bytes_prefetched,
        bytes_used=moved.bytes_used,
        bytes_wasted=moved.bytes_wasted,
        bytes_late=moved.bytes_late,
        bytes_demanded=moved.bytes_demanded,
        bytes_loaded=moved.bytes_loaded,
        identical=all(own.run.tokens == resident.tokens for own in done),
    )


def _drafts(policy: str, settings: FusionSettings, resident: ChainRun, reads: bool) -> FusionDrafts:
    steps = resident.steps
    return FusionDrafts(
        policy=policy,
        drafter=settings.drafter,
        steps=len(steps),
        tau=round((len(resident.tokens) - 1) / len(steps), 4),
        draft_ms=round(1e3 * statistics.fmean(step.draft_s for step in steps), 3),
        has_states=reads and any(step.draft.states is not None for step in steps),
        verify_ms=round(1e3 * statistics.fmean(step.verify_s for step in steps), 3),
    )


def _prompt(tokenizer: PreTrainedTokenizerBase, length: int) -> torch.Tensor:
    """Returns token ids [1, length] of a diary, from its first day on again where it is too short."""
    text = long_text(max(1, length // 40))
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
    return ids.repeat(1, -(-length // ids.shape[1]))[:, :length]
