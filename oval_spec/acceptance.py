"""How much of what is drafted is accepted: counts, what is computed from them, and what each figure means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from oval_core.errors import ConfigError

DEFINITIONS: Mapping[str, str] = MappingProxyType(
    {
        "steps": "forwards of the target that verified a tree, counted by row; the prompt's is none",
        "emitted": "tokens that these steps added to the texts; what comes after an end is not counted",
        "drafted": "nodes of the trees without their roots: tokens that were proposed",
        "accepted": "proposed tokens that were added to the texts",
        "tau": "emitted / steps: tokens a step, the target's own last one (bonus) included; 1 without drafts",
        "accepted_by_position": "share of all steps in which the 1st, 2nd, ... token after the root was a proposed one",
        "draft_acceptance_rate": "accepted / drafted; low for trees, of which one path at most is accepted",
        "emitted_histogram": "number of steps that added 0, 1, 2, ... tokens",
    }
)
"""What each key of `AcceptanceCounters.to_dict` means, in the words that are shown with the figures."""


@dataclass(slots=True)
class AcceptanceCounters:
    """Counts of one or more generations. See `DEFINITIONS`.

    Attributes:
        drafted: proposed tokens.
        accepted_counts: by position after the root: steps in which the proposed token there was accepted.
        emitted_histogram: by number of tokens: steps that added so many.
    """

    drafted: int = 0
    accepted_counts: list[int] = field(default_factory=list)
    emitted_histogram: list[int] = field(default_factory=list)

    def record(self, *, drafted: int, accepted: int, emitted: int) -> None:
        """Counts one step of one row.

        Args:
            drafted: nodes of its tree without the root.
            accepted: nodes that the verifier accepted, without the root.
            emitted: tokens that it added to the text: `accepted` + 1, fewer where the text ended among them.
        """
        assert 0 <= accepted <= drafted, "accepted tokens were proposed"
        assert 0 <= emitted <= accepted + 1, "a step emits what it accepted and one more"
        self.drafted += drafted
        kept = min(accepted, emitted)
        _add(self.accepted_counts, [1] * kept)
        _add(self.emitted_histogram, [0] * emitted + [1])

    @property
    def steps(self) -> int:
        """Forwards of the target, by row."""
        return sum(self.emitted_histogram)

    @property
    def emitted(self) -> int:
        """Tokens that were added."""
        return sum(size * steps for size, steps in enumerate(self.emitted_histogram))

    @property
    def accepted(self) -> int:
        """Proposed tokens that were added."""
        return sum(self.accepted_counts)

    @property
    def tau(self) -> float:
        """Tokens a step; 0 before the first."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def accepted_by_position(self) -> list[float]:
        """Share of all steps that accepted the 1st, 2nd, ... token after the root."""
        return [count / self.steps for count in self.accepted_counts]

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted of the proposed tokens; 0 where none was proposed."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def merge(self, other: AcceptanceCounters) -> None:
        """Adds the counts of another process, or of another prompt."""
        self.drafted += other.drafted
        _add(self.accepted_counts, other.accepted_counts)
        _add(self.emitted_histogram, other.emitted_histogram)

    def to_dict(self) -> dict[str, object]:
        """Returns every count and figure as plain values; `from_dict` reads the counts back."""
        return {
            "steps": self.steps,
            "emitted": self.emitted,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tau": self.tau,
            "accepted_by_position": self.accepted_by_position,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "emitted_histogram": list(self.emitted_histogram),
            "accepted_counts": list(self.accepted_counts),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> AcceptanceCounters:
        """Rebuilds counters from the values of `to_dict`."""
        drafted = values.get("drafted")
        if not _is_count(drafted):
            raise ConfigError(
                f"acceptance counts: got drafted = {drafted!r}. Allowed: a whole number from 0. Pass what to_dict gave."
            )
        lists = []
        for name in ("accepted_counts", "emitted_histogram"):
            counts = values.get(name)
            if not isinstance(counts, list) or not all(map(_is_count, counts)):
                raise ConfigError(
                    f"acceptance counts: got {name} = {counts!r}. Allowed: a list of whole numbers from 0. Pass what "
                    "to_dict gave."
                )
            lists.append(list(counts))
        assert isinstance(drafted, int)
        return cls(drafted, *lists)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _add(counts: list[int], more: list[int]) -> None:
    counts += [0] * (len(more) - len(counts))
    for i, count in enumerate(more):
        counts[i] += count
