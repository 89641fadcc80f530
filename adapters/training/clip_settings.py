"""How a small CLIP is trained: every default of `oval train clip`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from oval_core.config import check_int
from oval_core.errors import ConfigError

__all__ = ["HEAD_WIDTH", "ClipTraining"]

HEAD_WIDTH = 32
"""Of an attention head, in both towers."""
MOST_PAIRS = 512
"""Most pictures that one validation tells apart: a small library has not many more that differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipTraining:
    """Settings of one training.

    Attributes:
        pictures: folders of captioned cut-outs.
        out: folder of the model; the checkpoint lies there too.
        steps: updates; None where `minutes` ends it.
        minutes: time of all runs together; or None.
        image_size: pixels a side.
        patch: pixels a side of a patch.
        width: of the image tower, a multiple of `HEAD_WIDTH`.
        layers: of the image tower.
        text_width: of the text tower, a multiple of `HEAD_WIDTH`.
        text_layers: of the text tower.
        context_length: tokens of a text, its two ends included; a page of 32 tokens of a decoder fits.
        embed_dim: of the joint space.
        batch: pairs of an update: each picture is told from the other captions, each caption from the other pictures.
        rate: learning rate at its highest.
        weight_decay: of the towers' matrices.
        alike: share of updates whose pictures have one kind and one ground, so that only things tell them apart.
        seed: of scenes, captions and weights.
        split_seed: of which things are held out.
        validation: new pictures to judge by, and as many of things that are never trained on.
        validate_every: updates from a validation to the next.
        save_every: updates from a checkpoint to the next.
        sources: where the pictures are from, with their licences, for the record.
    """

    pictures: tuple[str, ...]
    out: str
    steps: int | None = None
    minutes: float | None = None
    image_size: int = 112
    patch: int = 14
    width: int = 192
    layers: int = 6
    text_width: int = 128
    text_layers: int = 4
    context_length: int = 48
    embed_dim: int = 128
    batch: int = 128
    rate: float = 1e-3
    weight_decay: float = 0.1
    alike: float = 0.5
    seed: int = 0
    split_seed: int = 0
    validation: int = 64
    validate_every: int = 200
    save_every: int = 100
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.pictures:
            raise ConfigError("pictures: got none. Allowed: folders with NAME.png beside NAME.txt. Name one.")  # fmt: skip
        if (self.steps is None) == (self.minutes is None):
            raise ConfigError(
                f"steps: got steps {self.steps} and minutes {self.minutes}. Allowed: one of them. Give --steps or --minutes."
            )
        for name in ("patch", "layers", "text_layers", "embed_dim", "validate_every", "save_every"):
            check_int(name, getattr(self, name), 1, None)
        check_int("context_length", self.context_length, 8, None)
        check_int("batch", self.batch, 2, None)
        check_int("validation", self.validation, 2, MOST_PAIRS)
        if self.steps is not None:
            check_int("steps", self.steps, 1, None)
        self._check_numbers()
        check_int("image_size", self.image_size, 1, None)
        if self.image_size % self.patch:
            raise ConfigError(
                f"image_size: got {self.image_size} with patches of {self.patch}. Allowed: a multiple of the patch. "
                "Give such a size."
            )
        for name in ("width", "text_width"):
            value = getattr(self, name)
            check_int(name, value, HEAD_WIDTH, None)
            if value % HEAD_WIDTH:
                raise ConfigError(
                    f"{name}: got {value}. Allowed: a multiple of {HEAD_WIDTH}, the width of a head. Give such a number."
                )

    def _check_numbers(self) -> None:
        for name in ("rate", "minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}: got {value!r}. Allowed: above 0. Give such a number.")
        if not self.weight_decay >= 0:
            raise ConfigError(
                f"weight_decay: got {self.weight_decay!r}. Allowed: 0 or more. Give such a number."
            )
        if not 0 <= self.alike <= 1:
            raise ConfigError(f"alike: got {self.alike!r}. Allowed: 0 to 1. Give such a share.")

    def to_dict(self) -> dict[str, Any]:
        """Returns the plain values."""
        return asdict(self)
