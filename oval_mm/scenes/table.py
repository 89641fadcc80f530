"""Scenes and albums as a file in MMBench's form, to evaluate on. Trains nothing."""

from __future__ import annotations

import base64
import csv
import io
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oval_core.errors import ConfigError, did_you_mean
from oval_mm.scenes.library import Library
from oval_mm.scenes.questions import ALBUM_TASKS, LETTERS, TASKS, Choice, ask, ask_album, kind_for
from oval_mm.scenes.scene import SIDE, Scene, draw, make_scene

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Item", "make_album", "make_items", "write_mmbench_tsv"]

COLUMNS = ("index", "question", *LETTERS, "answer", "category", "l2-category", "split", "image")
ALBUM = 8
"""Pictures of an album where nothing else is said."""


@dataclass(frozen=True, slots=True)
class Item:
    """One question with what it is about.

    Attributes:
        scenes: one, or those of an album.
        choice: the question.
    """

    scenes: tuple[Scene, ...]
    choice: Choice


def make_items(
    library: Library,
    *,
    seed: int,
    per_task: int,
    tasks: Sequence[str] = tuple(TASKS),
    held_out: bool = False,
    album: int = ALBUM,
) -> Iterator[Item]:
    """Yields questions, `per_task` of each task, the right letter as often A as B, C and D.

    Args:
        library: of what scenes are made.
        seed: another one gives other scenes; a training has a seed of its own.
        per_task: questions of each task.
        tasks: keys of `TASKS` and `ALBUM_TASKS`.
        held_out: asks about things that are never trained on, with options that are such things too.
        album: pictures of an album.

    Raises:
        ConfigError: no such task, or an album of fewer than 4 pictures.
    """
    known = (*TASKS, *ALBUM_TASKS)
    for task in tasks:
        if task not in known:
            raise ConfigError(f"task: got {task!r}; {did_you_mean(task, known)}")
    if album < len(LETTERS):
        raise ConfigError(f"album: got {album}. Allowed: {len(LETTERS)} or more. Give more pictures.")  # fmt: skip
    for task in tasks:
        for number in range(per_task):
            rng = random.Random(f"items/{seed}/{task}/{held_out}/{number}")
            if task in TASKS:
                scene = make_scene(library, kind_for(task, rng), rng, held_out=held_out)
                scenes, choice = (scene,), ask(scene, task, library, rng, held_out=held_out)
            else:
                scenes = make_album(library, album, rng, held_out=held_out)
                choice = ask_album(scenes, task, library, rng, held_out=held_out)
            turns = choice.rolled()
            yield Item(scenes, next(turn for turn in turns if turn.letter == LETTERS[number % 4]))


def make_album(library: Library, pictures: int, rng: random.Random, *, held_out: bool = False) -> tuple[Scene, ...]:  # fmt: skip
    """Returns scenes of one thing each, all of different nouns.

    Raises:
        ConfigError: there are too few different things for it and for wrong options.
    """
    there = len({cutout.caption.noun for cutout in library.part(held_out)})
    if pictures + len(LETTERS) > there:
        raise ConfigError(
            f"album: got {pictures}. Allowed: up to {there - len(LETTERS)} with these pictures. Give fewer, or more folders."
        )
    scenes: list[Scene] = []
    nouns: set[str] = set()
    while len(scenes) < pictures:
        scene = make_scene(library, "one", rng, held_out=held_out)
        noun = scene.placed[0].cutout.caption.noun
        if noun not in nouns:
            nouns.add(noun)
            scenes.append(scene)
    return tuple(scenes)


def write_mmbench_tsv(
    path: str | Path, library: Library, items: Sequence[Item], *, split: str = "scenes", side: int = SIDE
) -> int:  # fmt: skip
    """Writes questions in MMBench's form, pictures as base64 PNG; returns how many.

    The pictures are derived from the library's: the file has their licence.

    Args:
        path: of the .tsv; written whole or not at all.
        library: of the scenes.
        items: questions.
        split: name in the column of that name.
        side: pixels a side.

    Raises:
        ConfigError: the file cannot be written.
    """
    target = Path(path).expanduser()
    partial = target.with_name(target.name + ".partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter="\t", lineterminator="\n")
            writer.writerow(COLUMNS)
            for index, item in enumerate(items):
                writer.writerow(_row(index, item, library, split, side))
        partial.replace(target)
    except OSError as error:
        raise ConfigError(
            f"out: cannot write {target}: {error.strerror}. Allowed: a file in a writable folder. Name another one."
        ) from error
    return len(items)


def _row(index: int, item: Item, library: Library, split: str, side: int) -> list[str]:
    choice = item.choice
    images = [_base64(draw(scene, library, side)) for scene in item.scenes]
    image = images[0] if len(images) == 1 else str(images)
    wider = "one picture" if choice.task in TASKS else "many pictures"
    options = [choice.options[letter] for letter in LETTERS]
    return [str(index), choice.question, *options, choice.letter, choice.task, wider, split, image]


def _base64(image: Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()
