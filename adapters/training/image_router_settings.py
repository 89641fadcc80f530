"""What a router of image pages is trained on and how: every default of `oval train image-router`. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oval_core.config import check_int
from oval_core.errors import ConfigError
from oval_core.vision_config import VisionConfig, check_tile

__all__ = ["SHARES", "ImageRouterTraining"]

SHARES = (0.11, 0.25, 0.33, 0.5)
"""Of the image pages: recall is told at these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRouterTraining:
    """Settings of one training.

    Attributes:
        model: the LLaVA that the router is for: an embedded name, a folder or a hub id.
        data: tables of MMBench's form, whose questions are asked. Judge by others.
        out: folder for the router; a run that was cut off goes on.
        recordings: folder of recordings that trainings share; None for one below `out`.
        init: how the router begins, see `FusionConfig.init`.
        clip: CLIP that `init: clip` is fitted to, and that is compared; see `VisionConfig.clip`.
        questions: of each table, a seeded draw; 0 for all.
        steps: updates.
        num_queries: last tokens of a question whose attention is learnt.
        layers: decoder layers whose attention counts; None for all.
        tile: patches on a side of a page, see `VisionConfig.tile`.
        size: width of the router.
        held_out: share of the questions that judge; no picture is on both sides.
        budget: share of the image pages by which the best router is kept.
        style: form of the prompts, as in `oval eval mmbench`.
        seed: of draw, split, weights and order.
    """

    model: str
    data: tuple[str, ...]
    out: str
    recordings: str | None = None
    init: str = "random"
    clip: str | None = None
    questions: int = 300
    steps: int = 1000
    num_queries: int = 8
    layers: tuple[int, ...] | None = None
    tile: int = VisionConfig().tile
    size: int = 128
    held_out: float = 0.15
    budget: float = 0.33
    style: str = "llava"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.data:
            raise ConfigError("data: got none. Allowed: one table or more. Name one.")
        if self.init == "clip" and self.clip is None:
            raise ConfigError(
                "init: got 'clip' without --clip. Allowed: with a CLIP by name or folder. Add --clip NAME, or choose another init."
            )
        for name, low in (("questions", 0), ("steps", 1), ("num_queries", 1), ("seed", 0)):
            check_int(name, getattr(self, name), low, None)
        check_tile(self.tile)

    @property
    def recordings_folder(self) -> Path:
        """Where recordings lie."""
        return Path(self.out) / "recordings" if self.recordings is None else Path(self.recordings)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plain values."""
        return asdict(self)

    def to_public_dict(self) -> dict[str, Any]:
        """Returns the plain values without the places of this machine."""
        values = self.to_dict()
        del values["out"], values["recordings"]
        values["data"] = [Path(path).name for path in self.data]
        values["model"] = _public(self.model)
        values["clip"] = None if self.clip is None else _public(self.clip)
        return values


def _public(text: str) -> str:
    """Returns a name with each path in it cut to its last part, as in `open_clip:local-dir:FOLDER`."""
    parts = re.split("([:,])", text)
    return "".join(Path(part).name if part and Path(part).exists() else part for part in parts)
