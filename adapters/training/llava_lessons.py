"""What a small LLaVA is asked at each update: scenes, albums, questions, by how far training is. Sees no pixel.

Every lesson is a function of the seed and its number alone, so a training that goes on gives the same ones.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from oval_adapters.training.llava_rows import Part, Row, RowMaker
from oval_adapters.training.llava_settings import LlavaTraining
from oval_mm.prompts import choice_prompt
from oval_mm.scenes import (
    ALBUM_TASKS,
    Choice,
    Item,
    Library,
    Scene,
    ask,
    ask_album,
    make_items,
    make_scene,
    tell,
)

__all__ = ["Lesson", "Lessons", "check_rows"]

_KIND_SHARES = {"one": 0.42, "two": 0.2, "many": 0.18, "three": 0.2}
_TASKS_OF = {
    "one": ("naming", "naming", "naming", "colour"),
    "two": ("left_right", "left_right", "left_right", "existence", "colour"),
    "many": ("counting", "counting", "naming", "naming", "colour"),
    "three": ("existence", "existence", "existence", "counting", "colour"),
}
_ASK_TEXT = "Answer with the option's text from the given choices directly."
_NEAR = 0.35
"""How often wrong options are of the right one's folder."""
_ROLLED = 0.5
"""How often a question is asked again with its options moved on."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """One row to be: pictures and questions.

    Attributes:
        scenes: numbers of the pictures.
        row: questions as tokens.
    """

    scenes: tuple[int, ...]
    row: Row


class Lessons:
    """All lessons of a training.

    Attributes:
        scenes: that lessons are about, by number.
    """

    def __init__(self, library: Library, maker: RowMaker, settings: LlavaTraining) -> None:
        self._library, self._maker, self._settings = library, maker, settings
        self.scenes = [self._scene(number) for number in range(settings.scenes)]
        self._ones = [number for number, scene in enumerate(self.scenes) if scene.kind == "one"]

    def at(self, update: int, progress: float) -> list[Lesson]:
        """Returns the lessons of an update.

        Args:
            update: its number, from 0.
            progress: share of the training that is done.
        """
        rng = random.Random(f"lessons/{self._settings.seed}/{update}")
        if self._settings.stage == "llava" and progress > 0.5 and rng.random() < self._settings.albums:  # fmt: skip
            albums = max(1, self._settings.batch // 3)
            return [self._album(rng) for _ in range(albums)]
        first = update * self._settings.batch
        numbers = [(first + i) % len(self.scenes) for i in range(self._settings.batch)]
        return [self._lesson(number, rng, progress) for number in numbers]

    def _scene(self, number: int) -> Scene:
        rng = random.Random(f"scene/{self._settings.seed}/{number}")
        (kind,) = rng.choices(list(_KIND_SHARES), list(_KIND_SHARES.values()))
        return make_scene(self._library, kind, rng)

    def _lesson(self, number: int, rng: random.Random, progress: float) -> Lesson:
        scene, count = self.scenes[number], self._settings.questions
        parts = [self._said(scene, rng)]
        if self._settings.stage == "projector":
            parts += [self._said(scene, rng) for _ in range(count - 1)]
            return Lesson((number,), Row(self._maker.opening(1), tuple(parts)))
        if progress < 0.15 and count > 3:
            parts.append(self._said(scene, rng))
        drills = 2 if progress < 0.1 else 1 if progress < 0.5 else 0
        drills = min(drills, count - len(parts) - 1)
        parts += [self._drill(rng) for _ in range(drills)]
        as_text = max(0.1, 0.6 - 2 * progress)
        while len(parts) < count:
            choice = ask(scene, rng.choice(_TASKS_OF[scene.kind]), self._library, rng, near=_NEAR)
            parts.append(self._choice(choice, rng.random() < as_text))
            if len(parts) < count and rng.random() < _ROLLED:
                parts.append(self._choice(rng.choice(choice.rolled()[1:]), False))
        return Lesson((number,), Row(self._maker.opening(1), tuple(parts)))

    def _album(self, rng: random.Random) -> Lesson:
        """Returns a lesson about several pictures that were seen alone before, all of different nouns."""
        size = rng.randint(max(4, self._settings.album - 3), self._settings.album)
        numbers: list[int] = []
        nouns: set[str] = set()
        for number in rng.sample(self._ones, len(self._ones)):
            noun = self.scenes[number].placed[0].cutout.caption.noun
            if noun not in nouns:
                nouns.add(noun)
                numbers.append(number)
            if len(numbers) == size:
                break
        shown = [self.scenes[number] for number in numbers]
        asked = [ask_album(shown, rng.choice(list(ALBUM_TASKS)), self._library, rng) for _ in range(self._settings.questions)]  # fmt: skip
        parts = tuple(self._choice(choice, False) for choice in asked)
        return Lesson(tuple(numbers), Row(self._maker.opening(len(numbers)), parts))

    def _said(self, scene: Scene, rng: random.Random) -> Part:
        said = tell(scene, rng)
        return self._maker.part(said.question, said.answer, is_words=True)

    def _drill(self, rng: random.Random) -> Part:
        """Returns a question about a picture that is told in words: how letters stand for options is learnt sooner so."""
        scene = self.scenes[rng.randrange(len(self.scenes))]
        choice = ask(scene, rng.choice(_TASKS_OF[scene.kind]), self._library, rng, near=_NEAR)
        told = tell(scene, rng).answer
        while "picture shows" not in told:
            told = tell(scene, rng).answer
        if choice.task == "counting" and scene.kind != "many":
            told = f"{told} These are {choice.text} things."
        text = f"{told}\n{choice_prompt(choice.question, None, choice.options, 'llava')}"
        return self._maker.part(text, choice.letter, is_words=False, sees_pictures=False)

    def _choice(self, choice: Choice, as_text: bool) -> Part:
        prompt = choice_prompt(choice.question, None, choice.options, "llava")
        if as_text:
            prompt = f"{prompt.rpartition(chr(10))[0]}\n{_ASK_TEXT}"
        is_words = as_text or self._settings.choice_answer == "text"
        return self._maker.part(prompt, choice.text if is_words else choice.letter, is_words=is_words)  # fmt: skip


def check_rows(
    library: Library, maker: RowMaker, settings: LlavaTraining, *, held_out: bool
) -> list[tuple[Item, Row]]:
    """Returns questions to judge by, each in every order of its options: new pictures, of a seed that no lesson has.

    Args:
        library: of the scenes.
        maker: of rows.
        settings: how many of each sort.
        held_out: whether they are about things that are never trained on.
    """
    found = []
    for item in _items(library, settings, held_out):
        parts = []
        for choice in item.choice.rolled():
            prompt = choice_prompt(choice.question, None, choice.options, "llava")
            is_words = settings.choice_answer == "text"
            answer = choice.text if is_words else choice.letter
            parts.append(maker.part(prompt, answer, is_words=is_words))
        found.append((item, Row(maker.opening(len(item.scenes)), tuple(parts))))
    return found


def _items(library: Library, settings: LlavaTraining, held_out: bool) -> Sequence[Item]:
    return list(
        make_items(
            library, seed=settings.seed + 10_000, per_task=settings.validation, held_out=held_out
        )
    )
