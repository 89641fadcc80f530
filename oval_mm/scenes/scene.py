"""Scenes: cut-outs on a coloured ground, drawn anew by a seed. Knows no question."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from oval_core.errors import ConfigError, did_you_mean
from oval_mm.scenes.library import Cutout, Library

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["COLOURS", "KINDS", "Placed", "Scene", "coverage", "draw", "make_scene"]

COLOURS = {
    "red": (205, 40, 40),
    "orange": (240, 140, 30),
    "yellow": (240, 222, 60),
    "green": (60, 160, 70),
    "blue": (50, 90, 205),
    "purple": (130, 60, 165),
    "pink": (245, 150, 190),
    "brown": (120, 75, 40),
    "grey": (130, 130, 130),
    "white": (246, 246, 246),
    "black": (18, 18, 18),
}
"""Grounds, by the names that questions give them."""

SHADE = 12
"""A ground is lighter or darker than its colour by at most so much, in each of red, green and blue."""

KINDS = ("one", "two", "many", "three")
"""One thing; two, left and right; one thing some times; three different things."""

MOST = 4
"""Times that a thing may be there."""

SIDE = 224
"""Pixels a side where nothing else is said."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A cut-out in a scene.

    Attributes:
        cutout: what is there.
        x: of its middle, a share of the side.
        y: of its middle, a share of the side.
        size: of its longer side, a share of the side.
        mirrored: left and right exchanged.
    """

    cutout: Cutout
    x: float
    y: float
    size: float
    mirrored: bool


@dataclass(frozen=True, slots=True)
class Scene:
    """What is drawn.

    Attributes:
        kind: one of `KINDS`.
        placed: things; of two, the left one first.
        colour: name of the ground.
        ground: red, green, blue.
    """

    kind: str
    placed: tuple[Placed, ...]
    colour: str
    ground: tuple[int, int, int]

    @property
    def names(self) -> tuple[str, ...]:
        """The different names of what is there."""
        return tuple(dict.fromkeys(one.cutout.name for one in self.placed))


def make_scene(library: Library, kind: str, rng: random.Random, *, held_out: bool = False) -> Scene:
    """Returns a new scene.

    Args:
        library: of what it is made.
        kind: one of `KINDS`.
        rng: decides everything else.
        held_out: makes it of things that are never trained on, and of nothing else.

    Raises:
        ConfigError: no such kind.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind: got {kind!r}; {did_you_mean(kind, KINDS)}")
    colour = rng.choice(list(COLOURS))
    ground = tuple(min(255, max(0, part + rng.randint(-SHADE, SHADE))) for part in COLOURS[colour])
    part = library.part(held_out)
    if kind == "one":
        placed = [_place(rng.choice(part), rng, (0.0, 0.0, 1.0, 1.0), 0.6, 1.0)]
    elif kind == "two":
        left, right = _different(part, 2, rng)
        placed = [
            _place(left, rng, (0.0, 0.0, 0.5, 1.0), 0.75, 1.0),
            _place(right, rng, (0.5, 0.0, 1.0, 1.0), 0.75, 1.0),
        ]
    else:
        corners = [(x, y, x + 0.5, y + 0.5) for x in (0.0, 0.5) for y in (0.0, 0.5)]
        if kind == "many":
            things = [rng.choice(part)] * rng.randint(1, MOST)
        else:
            things = _different(part, 3, rng)
        cells = rng.sample(corners, len(things))
        placed = [_place(thing, rng, cell, 0.7, 1.0) for thing, cell in zip(things, cells, strict=True)]  # fmt: skip
    return Scene(kind, tuple(placed), colour, (ground[0], ground[1], ground[2]))


def draw(scene: Scene, library: Library, side: int = SIDE) -> Image:
    """Returns the picture [side, side, RGB]."""
    from PIL import Image as Images

    picture = Images.new("RGB", (side, side), scene.ground)
    for one in scene.placed:
        cut = _cut(one, library, side)
        picture.paste(cut, _corner(one, cut, side), cut)
    return picture


def coverage(scene: Scene, library: Library, rows: int, columns: int) -> np.ndarray:
    """Returns which share of each cell of a grid a thing covers, float32 [things, rows, columns]."""
    from PIL import Image as Images

    side = 4 * max(rows, columns)
    shares = np.zeros((len(scene.placed), rows, columns), np.float32)
    for place, one in enumerate(scene.placed):
        mask = Images.new("L", (side, side), 0)
        cut = _cut(one, library, side)
        mask.paste(cut.getchannel("A"), _corner(one, cut, side))
        small = mask.resize((columns, rows), Images.Resampling.BOX)
        shares[place] = np.asarray(small, np.float32) / 255
    return shares


def _different(part: Sequence[Cutout], count: int, rng: random.Random) -> list[Cutout]:
    """Returns cut-outs of different nouns."""
    found: list[Cutout] = []
    while len(found) < count:
        one = rng.choice(part)
        if all(one.caption.noun != other.caption.noun for other in found):
            found.append(one)
    return found


def _place(
    cutout: Cutout,
    rng: random.Random,
    cell: tuple[float, float, float, float],
    least: float,
    most: float,
) -> Placed:
    """Puts a cut-out somewhere in a cell (left, top, right, bottom), `least` to `most` of what fits."""
    left, top, right, bottom = cell
    size = rng.uniform(least, most) * min(right - left, bottom - top)
    x = rng.uniform(left + size / 2, right - size / 2)
    y = rng.uniform(top + size / 2, bottom - size / 2)
    return Placed(cutout, x, y, size, rng.random() < 0.5)


def _cut(one: Placed, library: Library, side: int) -> Image:
    from PIL import Image as Images
    from PIL import ImageOps

    image = library.image(one.cutout)
    scale = one.size * side / max(image.size)
    width, height = (max(1, round(length * scale)) for length in image.size)
    image = image.resize((width, height), Images.Resampling.BILINEAR)
    return ImageOps.mirror(image) if one.mirrored else image


def _corner(one: Placed, cut: Image, side: int) -> tuple[int, int]:
    return round(one.x * side - cut.width / 2), round(one.y * side - cut.height / 2)
