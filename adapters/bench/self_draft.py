"""What a draft by the target itself gains from the pages that it reads: routed against window-only, at equal budgets.

The article's claim of a higher acceptance can hold only here: where all pages are verified, what is fetched first cannot
change what is accepted. Prints nothing.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from oval_adapters.attachment import attach
from oval_adapters.bench.fusion_chain import ChainRun, ChainStep, decode_chains, prefill
from oval_adapters.bench.machine import machine, versions
from oval_adapters.bench.recall_intervals import interval
from oval_adapters.bench.self_draft_values import (
    SelfDraftGain,
    SelfDraftReport,
    SelfDraftRow,
    SelfDraftSettings,
)
from oval_adapters.speculative.self_draft import SelfDrafter, watched_cache
from oval_adapters.texts import passages
from oval_core.config import OvalConfig, RoutingConfig
from oval_core.speculation_config import SpeculationConfig
from oval_spec.drafter import NullDrafter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from oval_adapters.attachment import Attachment
    from oval_adapters.hf_cache import OvalCache

__all__ = ["describe", "measure_self_draft", "num_ticks"]

Tick = Callable[[str, int], None]
"""Told what runs, and how many texts are done."""

_Runs = dict[tuple[str, int], list[tuple[ChainRun, bool]]]
"""By policy and budget: the run of each passage, and whether its text is that of plain decoding."""


def measure_self_draft(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: SelfDraftSettings,
    tick: Tick | None = None,
) -> Iterator[SelfDraftRow]:
    """Decodes each passage plainly and with every policy and budget, from one prefill; yields rows kind by kind.

    Args:
        model: not attached.
        tokenizer: the model's.
        settings: what to measure.
        tick: called after each text.
    Raises:
        ConfigError: a text is too short, or the router does not fit the model.
    """
    tell = tick or (lambda _label, _done: None)
    routing = RoutingConfig(router=settings.router)
    with attach(model, OvalConfig()) as oval:
        for context in settings.contexts:
            for kind in settings.kinds:
                runs: _Runs = {}
                for number, prompt in enumerate(_prompts(tokenizer, settings, context, kind), 1):
                    label = f"{context} tokens, {kind} {number}/{settings.passages}"
                    _run_passage(oval, prompt, routing, settings, runs, lambda: tell(label, 1))  # noqa: B023
                for (policy, budget), own in runs.items():
                    yield _row(context, kind, policy, budget, own, settings.depth)


def num_ticks(settings: SelfDraftSettings) -> int:
    """Returns how far `measure_self_draft` will move a bar."""
    runs = 1 + len(settings.policies) * len(settings.budgets)
    return len(settings.contexts) * len(settings.kinds) * settings.passages * runs


def gains(rows: Sequence[SelfDraftRow], seed: int) -> tuple[SelfDraftGain, ...]:
    """Returns what routed drafts gain over window-only ones, where both were measured."""
    found = []
    for context, budget in dict.fromkeys((row.context, row.budget) for row in rows):
        own = [row for row in rows if (row.context, row.budget) == (context, budget)]
        by_policy = {
            policy: {row.kind: row for row in own if row.policy == policy}
            for policy in ("routed", "window")
        }
        routed, window = by_policy["routed"], by_policy["window"]
        kinds = [kind for kind in window if kind in routed]
        if not kinds:
            continue
        differences = [
            [
                a - b
                for a, b in zip(
                    routed[kind].acceptance_by_passage,
                    window[kind].acceptance_by_passage,
                    strict=True,
                )
            ]
            for kind in kinds
        ]
        found.append(
            SelfDraftGain(
                context=context,
                budget=budget,
                gain=round(statistics.fmean(statistics.fmean(d) for d in differences), 4),
                interval=interval(differences, seed),
                window_acceptance=round(statistics.fmean(window[k].acceptance for k in kinds), 4),
                routed_acceptance=round(statistics.fmean(routed[k].acceptance for k in kinds), 4),
            )
        )
    return tuple(found)


def describe(
    name: str, model: PreTrainedModel, settings: SelfDraftSettings, rows: Sequence[SelfDraftRow]
) -> SelfDraftReport:
    """Puts rows and the circumstances of their measurement together."""
    return SelfDraftReport(
        rows=tuple(rows),
        gains=gains(rows, settings.seed),
        model=name,
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        threads=torch.get_num_threads(),
        settings=settings,
        versions=versions(),
        machine=machine(model.device),
    )


def _prompts(
    tokenizer: PreTrainedTokenizerBase, settings: SelfDraftSettings, context: int, kind: str
) -> list[torch.Tensor]:
    found = passages(
        [kind],
        settings.data,
        tokenizer,
        context=context,
        steps=settings.new_tokens,
        count=settings.passages,
        seed=settings.seed,
        split="test",
    )
    return [passage.prompt_ids[None] for passage in found]


def _run_passage(
    oval: Attachment,
    prompt: torch.Tensor,
    routing: RoutingConfig,
    settings: SelfDraftSettings,
    runs: _Runs,
    done: Callable[[], None],
) -> None:
    room = prompt.shape[1] + settings.new_tokens + settings.depth
    model = oval.model
    with contextlib.closing(watched_cache(oval, routing, reserve_tokens=room)) as cache:
        first, hidden = prefill(model, cache, prompt.to(model.device), settings.chunk)
        text, count = [*prompt[0].tolist(), first], settings.new_tokens
        with contextlib.closing(cache.copy()) as own:
            plain = decode_chains(model, own, text, hidden, NullDrafter(), count, settings.depth)
        done()
        for policy in settings.policies:
            for budget in settings.budgets:
                with contextlib.closing(cache.copy()) as own:
                    drafter = _drafter(oval, own, routing, settings, policy, budget)
                    run = decode_chains(model, own, text, hidden, drafter, count, settings.depth)
                same = run.tokens == plain.tokens
                runs.setdefault((policy, budget), []).append((run, same))
                done()


def _drafter(
    oval: Attachment,
    cache: OvalCache,
    routing: RoutingConfig,
    settings: SelfDraftSettings,
    policy: str,
    budget: int,
) -> SelfDrafter:
    config = SpeculationConfig(
        drafter="self", depth=settings.depth, self_policy=policy, self_budget=budget
    )
    drafter = SelfDrafter(oval, config, routing)
    drafter.bind(cache)
    return drafter


def _row(
    context: int,
    kind: str,
    policy: str,
    budget: int,
    runs: Sequence[tuple[ChainRun, bool]],
    depth: int,
) -> SelfDraftRow:
    steps = [step for run, _ in runs for step in run.steps]
    drafted = sum(map(_drafted, steps))
    accepted = sum(step.accepted for step in steps)
    reached = [[step for step in steps if _drafted(step) > place] for place in range(depth)]
    return SelfDraftRow(
        context=context,
        kind=kind,
        policy=policy,
        budget=budget,
        acceptance=round(accepted / max(1, drafted), 4),
        tau=round(1 + accepted / len(steps), 4),
        accepted_by_position=tuple(
            round(sum(step.accepted > place for step in own) / max(1, len(own)), 4)
            for place, own in enumerate(reached)
        ),
        acceptance_by_passage=tuple(
            round(
                sum(step.accepted for step in run.steps) / max(1, sum(map(_drafted, run.steps))), 4
            )
            for run, _ in runs
        ),
        draft_ms=round(1e3 * statistics.median(step.draft_s for step in steps), 3),
        verify_ms=round(1e3 * statistics.median(step.verify_s for step in steps), 3),
        identical=all(same for _, same in runs),
        drafted=drafted,
        accepted=accepted,
    )


def _drafted(step: ChainStep) -> int:
    return len(step.draft.tree) - 1
