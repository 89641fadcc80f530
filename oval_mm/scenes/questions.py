"""Questions about scenes and albums, with answers that are right by construction. Draws nothing, knows no model."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from oval_core.errors import ConfigError, did_you_mean
from oval_mm.scenes.library import Cutout, Library
from oval_mm.scenes.scene import COLOURS, MOST, Scene

__all__ = ["ALBUM_TASKS", "LETTERS", "TASKS", "Choice", "Said", "ask", "ask_album", "tell"]

LETTERS = "ABCD"

TASKS = {
    "naming": "which thing is in the picture",
    "existence": "which of four things is among those in the picture",
    "left_right": "which thing is on the left, or on the right",
    "counting": "how many things there are",
    "colour": "which colour the ground has",
}
"""Sorts of multiple-choice questions about one picture."""

ALBUM_TASKS = {
    "album_find": "which of many pictures shows a thing",
    "album_name": "what one of many pictures shows",
}
"""Sorts of multiple-choice questions about many pictures."""

_KINDS_OF = {
    "naming": ("one", "one", "many"),
    "existence": ("three", "three", "two"),
    "left_right": ("two",),
    "counting": ("many", "many", "three"),
    "colour": ("one", "two", "many", "three"),
}
_NAMING = (
    "What is in the picture?",
    "What does the picture show?",
    "Which of these is in the picture?",
)
_EXISTENCE = ("Which of these can be seen in the picture?", "Which of these is in the picture?")
_COUNTING = ("How many things are in the picture?", "How many objects can be seen in the picture?")
_COLOUR = ("What colour is the background?", "Which colour does the background have?")
_NUMBERS = ("one", "two", "three", "four")


@dataclass(frozen=True, slots=True)
class Choice:
    """A multiple-choice question.

    Attributes:
        task: key of `TASKS` or `ALBUM_TASKS`.
        question: text, without the options.
        options: text by letter.
        letter: of the right option.
    """

    task: str
    question: str
    options: Mapping[str, str]
    letter: str

    @property
    def text(self) -> str:
        """The right option's text."""
        return self.options[self.letter]

    def rolled(self) -> list[Choice]:
        """Returns the question in every order of its options that MMBench asks, this one first."""
        letters, found = list(self.options), []
        for step in range(len(letters)):
            moved = {letters[at]: self.options[letters[at - step]] for at in range(len(letters))}
            right = next(letter for letter, text in moved.items() if text == self.text)
            found.append(Choice(self.task, self.question, moved, right))
        return found


@dataclass(frozen=True, slots=True)
class Said:
    """A question that is answered in words.

    Attributes:
        task: "caption", "word", or "listing".
        question: text.
        answer: text.
    """

    task: str
    question: str
    answer: str


def kind_for(task: str, rng: random.Random) -> str:
    """Returns a kind of scene that a task can be asked about."""
    return rng.choice(_KINDS_OF[task])


def ask(
    scene: Scene,
    task: str,
    library: Library,
    rng: random.Random,
    *,
    held_out: bool = False,
    near: float = 0.0,
) -> Choice:
    """Returns a question about a scene, its options in any order.

    Args:
        scene: of a kind that the task can be asked about.
        task: key of `TASKS`.
        library: whose names the wrong options are.
        rng: decides everything else.
        held_out: takes the wrong options from the things that are never trained on, else from the others.
        near: how often wrong options are things of the same folder as the right one, which are harder.

    Raises:
        ConfigError: no such task.
    """
    if task not in TASKS:
        raise ConfigError(f"task: got {task!r}; {did_you_mean(task, TASKS)}")
    if task == "colour":
        wrong = rng.sample([name for name in COLOURS if name != scene.colour], 3)
        return _choice(task, rng.choice(_COLOUR), scene.colour, wrong, rng)
    if task == "counting":
        right = str(len(scene.placed))
        wrong = [str(n) for n in range(1, MOST + 1) if str(n) != right]
        return _choice(task, rng.choice(_COUNTING), right, wrong, rng)
    here = [one.cutout for one in scene.placed]
    if task == "left_right":
        side = rng.randrange(2)
        right_one, other = here[side], here[1 - side]
        question = f"What is on the {('left', 'right')[side]} of the picture?"
        wrong = [other.name, *_others(right_one, here, library, held_out, near, 2, rng)]
        return _choice(task, question, right_one.name, wrong, rng)
    right_one = rng.choice(here)
    wrong = _others(right_one, here, library, held_out, near, 3, rng)
    question = rng.choice(_EXISTENCE if task == "existence" else _NAMING)
    return _choice(task, question, right_one.name, wrong, rng)


def ask_album(
    scenes: Sequence[Scene],
    task: str,
    library: Library,
    rng: random.Random,
    *,
    held_out: bool = False,
) -> Choice:
    """Returns a question about one picture of many, each with one thing; the things are of different nouns.

    Args:
        scenes: four or more, in order; pictures are counted from 1.
        task: key of `ALBUM_TASKS`.
        library: whose names wrong options are.
        rng: decides everything else.
        held_out: which part of the library the scenes are of.

    Raises:
        ConfigError: no such task.
    """
    if task not in ALBUM_TASKS:
        raise ConfigError(f"task: got {task!r}; {did_you_mean(task, ALBUM_TASKS)}")
    place = rng.randrange(len(scenes))
    shown = [scene.placed[0].cutout for scene in scenes]
    if task == "album_find":
        others = rng.sample([at for at in range(len(scenes)) if at != place], 3)
        question = f"Which picture shows {shown[place].caption.phrase}?"
        return _choice(task, question, f"picture {place + 1}", [f"picture {at + 1}" for at in others], rng)  # fmt: skip
    elsewhere = rng.sample([one.name for at, one in enumerate(shown) if at != place], 2)
    wrong = [*elsewhere, *_others(shown[place], shown, library, held_out, 0.0, 1, rng)]
    return _choice(task, f"What is in picture {place + 1}?", shown[place].name, wrong, rng)


def tell(scene: Scene, rng: random.Random) -> Said:
    """Returns something to say about a scene: a caption, a word, or what is on either side."""
    phrases = [one.cutout.caption.phrase for one in scene.placed]
    if scene.kind == "one" and rng.random() < 0.5:
        question = "What is in the picture?\nAnswer the question using a single word or phrase."
        return Said("word", question, scene.placed[0].cutout.name)
    question = rng.choice(("Describe the picture.", "What do you see in the picture?"))
    ground = f"on a {scene.colour} background" if scene.colour != "orange" else "on an orange background"  # fmt: skip
    if scene.kind == "one":
        return Said("caption", question, f"The picture shows {phrases[0]} {ground}.")
    if scene.kind == "two":
        answer = f"The picture shows {phrases[0]} on the left and {phrases[1]} on the right, {ground}."  # fmt: skip
        return Said("listing", question, answer)
    if scene.kind == "three":
        answer = f"The picture shows {phrases[0]}, {phrases[1]} and {phrases[2]} {ground}."
        return Said("listing", question, answer)
    number = _NUMBERS[len(phrases) - 1]
    times = "time" if len(phrases) == 1 else "times"
    return Said("listing", question, f"The picture shows {phrases[0]}, {number} {times}, {ground}.")


def _choice(task: str, question: str, right: str, wrong: Sequence[str], rng: random.Random) -> Choice:  # fmt: skip
    texts = [right, *wrong]
    rng.shuffle(texts)
    options = dict(zip(LETTERS, texts, strict=True))
    return Choice(task, question, options, LETTERS[texts.index(right)])


def _others(
    right: Cutout,
    here: Sequence[Cutout],
    library: Library,
    held_out: bool,
    near: float,
    count: int,
    rng: random.Random,
) -> list[str]:
    """Returns different names of things that are not there."""
    nouns = {one.caption.noun for one in here}
    pool = [one for one in library.part(held_out) if one.caption.noun not in nouns]
    if rng.random() < near:
        same = [one for one in pool if one.kind == right.kind]
        pool = same if len({one.name for one in same}) >= count else pool
    return _distinct(pool, count, rng.choice)


def _distinct(pool: Sequence[Cutout], count: int, choose: Callable[[Sequence[Cutout]], Cutout]) -> list[str]:  # fmt: skip
    names: list[str] = []
    while len(names) < count:
        name = choose(pool).name
        if name not in names:
            names.append(name)
    return names
