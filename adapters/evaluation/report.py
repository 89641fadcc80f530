"""The report of a run: figures of every side, whole and by category, for JSON, tables and pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from oval_adapters.bench.machine import machine, versions
from oval_adapters.evaluation.rows import Row
from oval_adapters.evaluation.settings import HF, PLAIN, AcceptanceSettings
from oval_adapters.evaluation.totals import Totals, totals
from oval_adapters.evaluation.units import Skipped
from oval_spec.acceptance import DEFINITIONS as COUNTS

if TYPE_CHECKING:
    from oval_adapters.attachment import Attachment

__all__ = ["DEFINITIONS", "AcceptanceReport", "make_report"]

_SHOWN_PARTINGS = 20

DEFINITIONS: dict[str, str] = {
    "prompts": "prompts that every side decoded, their first turns",
    "identical": "texts equal to plain decoding's in this run, token for token (same); null where texts are sampled",
    "drafted_per_step": "drafted / steps: a figure near 0 says that the drafter had nothing to propose, or was not asked",
    "tokens_per_s": "tokens after each text's first, over the seconds after the prompt's forward",
    "plain_tokens_per_s": "the same of plain decoding on OVAL, prompt by prompt in turn with the others",
    "speedup": "tokens_per_s over plain_tokens_per_s",
    "mean_speedup": "Spec-Bench's: mean over prompts of all tokens over all seconds, prompt included, over plain's mean",
    "whole_speedup": "all tokens over all seconds, prompt included, over plain decoding's",
    "interval": "95 %, by drawing the prompts anew 2000 times",
    "page_hit_rate": "pages that were in fast memory when a layer asked for them, of those asked for, in forwards after the prompt's",
    "stall_s": "seconds that layers waited for pages after the prompt, in the whole run; plain_stall_s is plain decoding's",
    "stall_hidden": "share of the seconds of transfers in which no layer waited: 1 less stall over transfers",
    "margin": "where a text parts: plain decoding's logit of its token less that of the other; near 0 is a tie",
}
"""What each figure means, beside those of `oval_spec.acceptance`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceReport:
    """What a run gave.

    Attributes:
        settings: what was asked.
        rows: all units that are done.
        whole: whether they are all units.
        overall: figures by side.
        by_category: figures by side, then by category.
        skipped: prompts that were too long.
        num_later_turns: second and later turns, which were not asked.
        processes: that shared the prompts.
        facts: dtype, backend, tiers, versions, machine.
    """

    settings: AcceptanceSettings
    rows: Sequence[Row]
    whole: bool
    overall: Mapping[str, Totals]
    by_category: Mapping[str, Mapping[str, Totals]]
    skipped: Sequence[Skipped]
    num_later_turns: int
    processes: int
    facts: Mapping[str, Any]

    @property
    def categories(self) -> list[str]:
        """Categories, in the order of the file."""
        return list(dict.fromkeys(row.category for row in self.rows))

    @property
    def labels(self) -> list[str]:
        """Sides, plain decoding first."""
        return [side.label for side in self.settings.every]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, ready for JSON: the main drafter's figures on top, then the others' by label."""
        drafters = [side.label for side in self.settings.sides]
        others = {label: self._figures(label) for label in self.labels if label != drafters[0]}
        return {
            **self._figures(drafters[0]),
            "drafter": drafters[0],
            "drafters": {label: others[label] for label in drafters[1:]},
            "baselines": {label: others[label] for label in (PLAIN, HF) if label in others},
            "page_hit_rate_reason": None if self.facts["tiers"] else "no tiers: every page is in fast memory",
            "definitions": definitions(),
            "settings": self.settings.to_dict(),
            "whole": self.whole,
            "skipped": [asdict(skip) for skip in self.skipped],
            "later_turns_not_asked": self.num_later_turns,
            "processes": self.processes,
            "model": self.settings.model,
            **self.facts,
        }  # fmt: skip

    def _figures(self, label: str) -> dict[str, Any]:
        own, categories = self.overall[label].to_dict(), self.by_category[label]
        widest = sorted(own["partings"], key=lambda p: -abs(p["margin"] or 0.0))
        taus = {name: totals_.tau for name, totals_ in categories.items()}
        known = [tau for tau in taus.values() if tau is not None]
        return {
            **own,
            "partings": widest[:_SHOWN_PARTINGS],
            "tau_by_category": taus,
            "tau_mean_of_categories": sum(known) / len(known) if known else None,
            "speedup_by_category": {name: part.speedup for name, part in categories.items()},
            "mean_speedup_by_category": {n: part.mean_speedup for n, part in categories.items()},
            "tokens_per_s_by_category": {n: part.tokens_per_s for n, part in categories.items()},
            "prompts_by_category": {name: part.prompts for name, part in categories.items()},
        }


def definitions() -> dict[str, str]:
    """Returns what each figure means."""
    return {**COUNTS, **DEFINITIONS}


def make_report(
    settings: AcceptanceSettings,
    rows: Sequence[Row],
    oval: Attachment,
    *,
    whole: bool,
    skipped: Sequence[Skipped],
    num_later_turns: int,
    processes: int,
    tiers: Mapping[str, Any] | None,
) -> AcceptanceReport:
    """Makes the report of the rows of all processes; at least one row."""
    labels = [side.label for side in settings.every]
    groups = {c: [row for row in rows if row.category == c] for c in dict.fromkeys(row.category for row in rows)}  # fmt: skip
    return AcceptanceReport(
        settings=settings,
        rows=rows,
        whole=whole,
        overall={label: totals(rows, label) for label in labels},
        by_category={
            label: {name: totals(own, label) for name, own in groups.items()} for label in labels
        },
        skipped=skipped,
        num_later_turns=num_later_turns,
        processes=processes,
        facts={
            "dtype": str(oval.model.dtype).removeprefix("torch."),
            "backend": oval.backend,
            "threads": torch.get_num_threads(),
            "tiers": tiers,
            "versions": versions(),
            "machine": machine(oval.model.device),
        },
    )
