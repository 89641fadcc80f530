"""What was measured of one unit: prompts decoded together, by each side. Plain values that survive a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from oval_spec.acceptance import AcceptanceCounters

__all__ = ["Parting", "Row", "SideRow"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parting:
    """Where a text first differs from plain decoding's.

    Attributes:
        step: number of the token, from 0.
        margin: logit of plain decoding's token there less that of the other: near 0 for a tie. None where one text is
            the beginning of the other.
    """

    step: int
    margin: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SideRow:
    """What one side did.

    Attributes:
        ids: new tokens of each prompt, the end token included.
        prompt_s: seconds to the end of the first forward, which reads the prompt and gives the first token.
        decode_s: seconds after it.
        counts: None where nothing was drafted.
        arrivals: how many tokens came together, in order, the first alone; None unless one prompt was decoded.
        partings: by prompt, None where it is plain decoding's text; empty where texts cannot be compared.
        tiers: pages `asked` for after the prompt and `found` in fast memory, `stall_s`, `transfer_s`; None without tiers.
    """

    ids: tuple[tuple[int, ...], ...]
    prompt_s: float
    decode_s: float
    counts: AcceptanceCounters | None = None
    arrivals: tuple[int, ...] | None = None
    partings: tuple[Parting | None, ...] = ()
    tiers: Mapping[str, float] | None = None

    @property
    def new_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.ids))

    @property
    def decoded_tokens(self) -> int:
        """Tokens that came after each prompt's first."""
        return self.new_tokens - len(self.ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One unit.

    Attributes:
        unit: its number in the run.
        category: of all its prompts.
        names: of its prompts.
        prompt_tokens: of its prompts.
        sides: by label.
    """

    unit: int
    category: str
    names: tuple[str, ...]
    prompt_tokens: tuple[int, ...]
    sides: Mapping[str, SideRow] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Row:
        """Builds the row from `to_dict`'s values, as JSON brings them back."""
        sides = {label: _side(own) for label, own in values["sides"].items()}
        parts = {name: tuple(values[name]) for name in ("names", "prompt_tokens")}
        return cls(unit=values["unit"], category=values["category"], sides=sides, **parts)


def _side(values: Mapping[str, Any]) -> SideRow:
    counts, arrivals = values["counts"], values["arrivals"]
    changed = {
        "ids": tuple(map(tuple, values["ids"])),
        "counts": None if counts is None else AcceptanceCounters.from_dict(counts),
        "arrivals": None if arrivals is None else tuple(arrivals),
        "partings": tuple(p and Parting(**p) for p in values["partings"]),
    }
    return SideRow(**{**values, **changed})
