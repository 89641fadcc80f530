"""Settings of speculative decoding: plain values, in the one place where their defaults live."""

from __future__ import annotations

from dataclasses import dataclass

from oval_core.config_section import read_section
from oval_core.errors import ConfigError, did_you_mean

DRAFTER_NAMES = ("auto", "draft", "hybrid", "medusa", "ngram", "none", "self")
VERIFICATION_NAMES = ("exact", "typical")
FUSION_ORDERS = ("draft", "intersection", "none", "recency", "target", "union")
FUSION_NAMES = ("auto", *FUSION_ORDERS)
SELF_DRAFT_NAMES = ("routed", "window")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationConfig:
    """How `oval.speculative` drafts and verifies.

    Attributes:
        drafter: `medusa`: heads alone; `ngram`: what followed the last tokens earlier in the text; `hybrid`: both in
            one tree; `draft`: a smaller model; `self`: this model, reading a part of its cache; `none`. `auto` takes
            `hybrid` where heads are known for this model, else `ngram`.
        heads: folder of draft heads; `auto` takes those that ship for this model.
        draft_model: model of drafter `draft`: an embedded model's name, a folder or a hub id.
        tree: shape of a tree of heads: `auto` grows each by the heads' own probabilities; or a name of
            `oval_spec.choices.TREES`.
        max_nodes: nodes of a tree, the root included; None chooses by what a forward costs here.
        depth: tokens that `draft` and `self` propose in a row.
        ngram_max: longest run of last tokens that `ngram` looks for.
        ngram_min: shortest.
        ngram_depth: tokens that `ngram` proposes in a row.
        verification: `exact`: greedy decoding keeps its tokens, sampling its distribution; `typical`: Medusa's
            typical acceptance, which is lossy.
        typical_threshold: epsilon of typical acceptance.
        typical_alpha: delta of typical acceptance.
        self_policy: what `self` reads: pages that a router chose, or the sinks and the last tokens.
        self_budget: tokens that `self` reads of a sequence.
        fusion: pages that are fetched before a tree is verified, and in which order, under `tiers`: what both sides
            expect and then what one does (`intersection`), both together (`union`), one side's (`draft`, `target`),
            the newest (`recency`), or nothing (`none`). `auto` measures whether `intersection` pays under policies
            that select, and is `none` where everything is read, where no order can save a transfer.
        turns_off: whether plain decoding goes on where speculation has been slower for a while.
    """

    drafter: str = "auto"
    heads: str = "auto"
    draft_model: str | None = None
    tree: str = "auto"
    max_nodes: int | None = None
    depth: int = 5
    ngram_max: int = 8
    ngram_min: int = 1
    ngram_depth: int = 8
    verification: str = "exact"
    typical_threshold: float = 0.09
    typical_alpha: float = 0.3
    self_policy: str = "routed"
    self_budget: int = 256
    fusion: str = "auto"
    turns_off: bool = True

    def __post_init__(self) -> None:
        _check_name("drafter", self.drafter, DRAFTER_NAMES)
        _check_name("verification", self.verification, VERIFICATION_NAMES)
        _check_name("fusion", self.fusion, FUSION_NAMES)
        _check_name("self_policy", self.self_policy, SELF_DRAFT_NAMES)
        for name in ("depth", "ngram_max", "ngram_min", "ngram_depth", "self_budget"):
            _check_whole(name, getattr(self, name))
        if self.max_nodes is not None:
            _check_whole("max_nodes", self.max_nodes)
        if self.ngram_min > self.ngram_max:
            raise ConfigError(
                f"speculation.ngram_min: got {self.ngram_min}. Allowed: up to ngram_max ({self.ngram_max}). Lower it."
            )
        for name in ("typical_threshold", "typical_alpha"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise ConfigError(
                    f"speculation.{name}: got {value!r}. Allowed: above 0, up to 1. Give such a number."
                )
        for name in ("heads", "tree"):
            value = getattr(self, name)
            if not (isinstance(value, str) and value):
                raise ConfigError(
                    f"speculation.{name}: got {value!r}. Allowed: a name, or auto. Name one."
                )
        if not isinstance(self.turns_off, bool):
            raise ConfigError(
                f"speculation.turns_off: got {self.turns_off!r}. Allowed: true or false. Give one of them."
            )
        named = self.draft_model is None or (isinstance(self.draft_model, str) and self.draft_model)
        if not named or (self.drafter == "draft") != (self.draft_model is not None):
            raise ConfigError(
                f"speculation.draft_model: got {self.draft_model!r} with drafter {self.drafter!r}. Allowed: a name with "
                "drafter 'draft', and none with others. Set both, or neither."
            )

    @classmethod
    def from_dict(cls, values: object) -> SpeculationConfig:
        """Builds the settings from plain values; an unknown key raises `ConfigError`."""
        return read_section(cls, "speculation", "drafter: medusa", values)


def _check_name(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"speculation.{name}: got {value!r}; {did_you_mean(str(value), allowed)}")


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"speculation.{name}: got {value!r}. Allowed: a whole number, 1 or more. Give one."
        )
