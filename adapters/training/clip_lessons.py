"""Which pictures and captions a small CLIP learns from at each update, and which it is judged by. Sees no pixel.

Everything is a function of a seed and a number alone, so a training that goes on gets the same lessons.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from oval_adapters.training.clip_settings import ClipTraining
from oval_mm.scenes import KINDS, Library, Scene, make_scene, tell

__all__ = ["Pair", "naming_pairs", "pairs_at", "scene_pairs"]

_TRIES = 8
"""A batch asks so often for things that it does not have yet: a small library has too few."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A picture to be, and what it shows.

    Attributes:
        scene: what is drawn.
        caption: text.
    """

    scene: Scene
    caption: str


def pairs_at(library: Library, settings: ClipTraining, update: int) -> list[Pair]:
    """Returns the pairs of an update, as far as it goes of different things: an equal one would be a wrong negative.

    Args:
        library: of the things; those that are held out are not taken.
        settings: how many, and how often pictures are alike.
        update: its number, from 0.
    """
    rng = random.Random(f"clip/{settings.seed}/{update}")
    like: Scene | None = None
    if rng.random() < settings.alike:
        like = make_scene(library, rng.choice(KINDS), rng)
    pairs: list[Pair] = []
    taken: set[frozenset[str]] = set()
    for _ in range(settings.batch):
        for _ in range(_TRIES):
            scene = _scene(library, rng, like)
            if frozenset(scene.names) not in taken:
                break
        taken.add(frozenset(scene.names))
        pairs.append(Pair(scene, tell(scene, rng).answer))
    return pairs


def scene_pairs(library: Library, settings: ClipTraining, *, held_out: bool) -> list[Pair]:
    """Returns new scenes of all kinds with whole captions, no two of which say the same.

    Args:
        library: of the things.
        settings: how many, and the seed.
        held_out: takes the things that are never trained on, and no others.
    """
    rng = random.Random(f"clip check/{settings.seed}/{held_out}")
    found: dict[object, Pair] = {}
    while len(found) < settings.validation:
        scene = make_scene(library, rng.choice(KINDS), rng, held_out=held_out)
        shown = (scene.names, len(scene.placed), scene.colour)
        found.setdefault(shown, Pair(scene, _whole_caption(scene, rng)))
    return list(found.values())


def naming_pairs(library: Library, settings: ClipTraining, *, held_out: bool) -> list[Pair]:
    """Returns new scenes of one thing each with its bare name, all different: neither ground nor number helps.

    They are fewer than asked for where the library has fewer names.
    """
    rng = random.Random(f"clip names/{settings.seed}/{held_out}")
    count = min(settings.validation, len(library.names(held_out)))
    found: dict[str, Pair] = {}
    while len(found) < count:
        scene = make_scene(library, "one", rng, held_out=held_out)
        name = scene.placed[0].cutout.name
        found.setdefault(name, Pair(scene, name))
    return list(found.values())


def _scene(library: Library, rng: random.Random, like: Scene | None) -> Scene:
    if like is None:
        return make_scene(library, rng.choice(KINDS), rng)
    scene = make_scene(library, like.kind, rng)
    return replace(scene, colour=like.colour, ground=like.ground)


def _whole_caption(scene: Scene, rng: random.Random) -> str:
    """Returns a caption with the ground, not a single word."""
    said = tell(scene, rng)
    while said.task == "word":
        said = tell(scene, rng)
    return said.answer
