"""The run: every side decodes each unit in turn, so that what drifts (heat, other load) meets all of them alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from oval_adapters.evaluation.decode import decode
from oval_adapters.evaluation.rows import Parting, Row, SideRow
from oval_adapters.evaluation.settings import PLAIN, AcceptanceSettings
from oval_adapters.evaluation.units import Unit

if TYPE_CHECKING:
    from oval_adapters.attachment import Attachment

__all__ = ["measure", "warm_up"]

_WARM_UP_TOKENS = 32
"""Enough for the steps in which sizes of trees are tried."""


def warm_up(oval: Attachment, unit: Unit, settings: AcceptanceSettings) -> None:
    """Lets every side decode a few tokens, not counted: heads are loaded, kernels built, forwards timed."""
    few = replace(settings, max_new_tokens=min(_WARM_UP_TOKENS, settings.max_new_tokens))
    for side in settings.every:
        decode(oval, side, unit, few)


def measure(oval: Attachment, units: Sequence[Unit], settings: AcceptanceSettings) -> Iterator[Row]:
    """Yields a row for each unit.

    Args:
        oval: the attached model.
        units: what this process decodes.
        settings: how.
    """
    every = settings.every
    for unit in units:
        first = unit.number % len(every)  # no side is always the first after a pause, or the last
        found = {
            side.label: decode(oval, side, unit, settings)
            for side in (*every[first:], *every[:first])
        }
        if settings.is_greedy:
            found = _compared(oval, unit, found)
        yield Row(
            unit=unit.number,
            category=unit.category,
            names=unit.names,
            prompt_tokens=tuple(map(len, unit.prompts)),
            sides={side.label: found[side.label] for side in every},
        )


def _compared(oval: Attachment, unit: Unit, found: dict[str, SideRow]) -> dict[str, SideRow]:
    """Returns the sides with where each text leaves plain decoding's."""
    wanted = found[PLAIN].ids
    partings: dict[str, list[Parting | None]] = {label: [] for label in found}
    for row, prompt in enumerate(unit.prompts):
        steps = {label: _first_difference(wanted[row], side.ids[row]) for label, side in found.items()}  # fmt: skip
        last = max((step for step in steps.values() if step is not None), default=None)
        logits = None if last is None else _plain_logits(oval, prompt, wanted[row], last)
        for label, side in found.items():
            step = steps[label]
            parting = None
            if step is not None and logits is not None:
                margin = _margin(logits[step], wanted[row][step:], side.ids[row][step:])
                parting = Parting(step=step, margin=margin)
            partings[label].append(parting)
    return {label: replace(side, partings=tuple(partings[label])) for label, side in found.items()}


def _first_difference(wanted: Sequence[int], got: Sequence[int]) -> int | None:
    for step, (a, b) in enumerate(zip(wanted, got, strict=False)):
        if a != b:
            return step
    return None if len(wanted) == len(got) else min(len(wanted), len(got))


@torch.no_grad()
def _plain_logits(
    oval: Attachment, prompt: Sequence[int], text: Sequence[int], last: int
) -> torch.Tensor:
    """Returns the logits [last + 1, V] of the first tokens of a text, in one plain forward."""
    cache = oval.new_cache()
    try:
        ids = torch.tensor([[*prompt, *text[:last]]], device=oval.model.device)
        output = oval.model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=last + 1)
        logits: torch.Tensor = output.logits[0].float()
        return logits
    finally:
        cache.close()


def _margin(logits: torch.Tensor, wanted: Sequence[int], got: Sequence[int]) -> float | None:
    if not wanted or not got:
        return None
    return float(logits[wanted[0]] - logits[got[0]])
