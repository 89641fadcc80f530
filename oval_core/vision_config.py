"""Settings of image pages: plain values, in the one place where their defaults live."""

from __future__ import annotations

from dataclasses import dataclass

from oval_core.config_section import read_section
from oval_core.errors import ConfigError

MAX_TILE = 5
"""Patches on a side: a tile and the newline tokens of its rows fit into one page then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """How a model that sees images keeps them.

    Attributes:
        tile: patches on each side of an image page, 1..5. Pages at the border of an image may be smaller.
        reuse_images: images whose features are kept, the last ones that were used: a second question about one of them
            does not run the vision tower again. 0 keeps none.
        budget: share of a row's image tokens that its prompt reads, 0..1; the others can be read later. None reads all.
        budget_tokens: the same as a number of tokens; None for no such limit. Not both.
        pages_per_image: pages of each image that are read in any case, unless the budget is 0.
        router: what chooses pages within the budget: `auto` (`clip` where one is named, else `uniform`), `clip`,
            `feature-norm`, `key-mean`, `random`, `uniform`, or the folder of a trained fusion router.
        clip: CLIP that `router: clip` embeds by: a name or folder of transformers, or `open_clip:ARCHITECTURE[,WEIGHTS]`.
        seed: of `router: random`.
    """

    tile: int = 4
    reuse_images: int = 8
    budget: float | None = None
    budget_tokens: int | None = None
    pages_per_image: int = 1
    router: str = "auto"
    clip: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_tile(self.tile)
        for name in ("reuse_images", "pages_per_image", "seed", "budget_tokens"):
            value = getattr(self, name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if not (is_whole and value >= 0) and not (name == "budget_tokens" and value is None):
                raise ConfigError(
                    f"vision.{name}: got {value!r}. Allowed: a whole number, 0 or more. Give one."
                )
        share = self.budget
        is_number = isinstance(share, int | float) and not isinstance(share, bool)
        if share is not None and not (is_number and 0 <= share <= 1):
            raise ConfigError(
                f"vision.budget: got {share!r}. Allowed: null, or a share from 0 to 1. Give one; tokens are budget_tokens."
            )
        if share is not None and self.budget_tokens is not None:
            raise ConfigError(
                f"vision.budget: got {share!r} with budget_tokens {self.budget_tokens}. Allowed: one of them. Leave one out."
            )
        for name in ("router", "clip"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (name == "clip" and value is None):
                raise ConfigError(f"vision.{name}: got {value!r}. Allowed: a name. Give one.")

    @property
    def limits_images(self) -> bool:
        """Whether a prompt may leave image tokens unread."""
        return self.budget is not None or self.budget_tokens is not None

    @property
    def page_tokens(self) -> int:
        """Most tokens of an image page."""
        return self.tile * (self.tile + 1)

    @classmethod
    def from_dict(cls, values: object) -> VisionConfig:
        """Builds the settings from plain values; an unknown key raises `ConfigError`."""
        return read_section(cls, "vision", "tile: 4", values)


def check_tile(tile: object) -> None:
    """Raises `ConfigError` unless it is a number of patches that fit into one page."""
    if isinstance(tile, bool) or not isinstance(tile, int) or not 1 <= tile <= MAX_TILE:
        raise ConfigError(f"vision.tile: got {tile!r}. Allowed: 1..{MAX_TILE}. Give such a number.")
