"""What `oval eval acceptance` is asked: prompts, how they are decoded, and the sides that are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from oval_core.errors import ConfigError
from oval_core.speculation_config import SpeculationConfig

__all__ = ["HF", "PLAIN", "AcceptanceSettings", "Side", "parse_sides"]

PLAIN = "plain"
HF = "hf"
_SEPARATOR = ":"


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One way to decode.

    Attributes:
        label: names it in tables: as the user typed it.
        settings: of `SpeculationConfig`; None decodes plainly.
    """

    label: str
    settings: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceSettings:
    """What is measured.

    Attributes:
        model: embedded name, folder or hub id.
        prompts: file of prompts.
        sides: the drafters, the main one first.
        limit: prompts in all; None for all of them.
        per_category: prompts of each category; None for all of them.
        max_new_tokens: tokens an answer, at most.
        temperature: 0 decodes greedily.
        seed: of sampling, set anew before each answer.
        batch_size: prompts that are decoded together.
        against_hf: whether plain Hugging Face decodes too.
    """

    model: str
    prompts: str
    sides: tuple[Side, ...]
    limit: int | None = None
    per_category: int | None = None
    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    batch_size: int = 1
    against_hf: bool = False

    def __post_init__(self) -> None:
        for name, value in (("max-new-tokens", self.max_new_tokens), ("batch-size", self.batch_size)):  # fmt: skip
            if value < 1:
                raise ConfigError(f"{name}: got {value}. Allowed: 1 or more. Give such a number.")
        if self.max_new_tokens < 2:
            raise ConfigError(
                "max-new-tokens: got 1. Allowed: 2 or more: the first token comes with the prompt, before any draft. "
                "Raise it."
            )
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(
                f"temperature: got {self.temperature}. Allowed: 0 or more. Choose such a value."
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed: got {self.seed}. Allowed: 0..{2**63 - 1}. Choose another.")

    @property
    def every(self) -> tuple[Side, ...]:
        """All sides: plain decoding, the drafters, then Hugging Face if asked."""
        last = (Side(label=HF),) if self.against_hf else ()
        return (Side(label=PLAIN), *self.sides, *last)

    @property
    def is_greedy(self) -> bool:
        """Whether texts can be compared: sampled ones differ by chance."""
        return self.temperature == 0

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, ready for JSON; of the file of prompts its name, not its place."""
        return {**asdict(self), "prompts": Path(self.prompts).name}


def parse_sides(text: str, shared: Mapping[str, Any]) -> tuple[Side, ...]:
    """Returns the sides of a list with commas, such as `hybrid,medusa:max_nodes=15,ngram`.

    Args:
        text: drafters, each with settings of its own after colons, if any.
        shared: settings of all of them; the side's own count more.

    Raises:
        ConfigError: no such drafter or setting, or a side that is named twice.
    """
    labels = [label.strip() for label in text.split(",")]
    if len(set(labels)) < len(labels):
        raise ConfigError(
            f"spec: got {text!r}, with a side named twice. Allowed: each once. Leave one out, or give it other settings."
        )
    return tuple(_parse_side(label, shared) for label in labels)


def _parse_side(label: str, shared: Mapping[str, Any]) -> Side:
    drafter, *parts = label.split(_SEPARATOR)
    own = dict(_parse_setting(label, part) for part in parts)
    settings = {**shared, **own, "drafter": drafter}
    if drafter != "draft" and "draft_model" not in own:
        settings.pop("draft_model", None)
    SpeculationConfig.from_dict(settings)
    return Side(label=label, settings=settings)


def _parse_setting(label: str, part: str) -> tuple[str, Any]:
    name, equals, value = part.partition("=")
    if not equals or name == "drafter":
        raise ConfigError(
            f"spec: got {part!r} in {label!r}. Allowed: SETTING=VALUE after the drafter's name, such as "
            "medusa:max_nodes=15. Write it so."
        )
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"spec: got {part!r} in {label!r}, whose value cannot be read: {error}. Allowed: a number, a name, true or "
            "false. Change it."
        ) from error
