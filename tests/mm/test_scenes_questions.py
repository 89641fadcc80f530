"""Scenes and questions: answers that the picture bears out, options that are wrong, files that MMBench's reader takes."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tiny_scenes import save_cutouts

from oval_core.errors import ConfigError
from oval_mm.mmbench import read_mmbench, roll
from oval_mm.scenes import (
    ALBUM_TASKS,
    COLOURS,
    KINDS,
    TASKS,
    Library,
    ask,
    ask_album,
    coverage,
    draw,
    make_album,
    make_items,
    make_scene,
    tell,
    write_mmbench_tsv,
)
from oval_mm.scenes.questions import kind_for
from oval_mm.scenes.scene import SHADE


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library([save_cutouts(tmp_path_factory.mktemp("cut-outs"))])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("held_out", [False, True])
def test_a_scene_is_of_its_seed_and_its_part(library: Library, kind: str, held_out: bool) -> None:
    for seed in range(20):
        scene = make_scene(library, kind, random.Random(seed), held_out=held_out)
        assert scene == make_scene(library, kind, random.Random(seed), held_out=held_out)
        assert all(one.cutout.is_held_out == held_out for one in scene.placed)
        assert all(one.x - one.size / 2 >= 0 and one.x + one.size / 2 <= 1.0001 for one in scene.placed)  # fmt: skip
        off = [abs(got - named) for got, named in zip(scene.ground, COLOURS[scene.colour], strict=True)]  # fmt: skip
        assert max(off) <= SHADE
    counts = {"one": {1}, "two": {2}, "many": {1, 2, 3, 4}, "three": {3}}[kind]
    seen = {len(make_scene(library, kind, random.Random(seed)).placed) for seed in range(60)}
    assert seen == counts


def test_a_picture_shows_its_ground_and_its_things_where_they_are(library: Library) -> None:
    scene = make_scene(library, "two", random.Random(3))
    picture = np.asarray(draw(scene, library, 64)).astype(int)
    assert picture.shape == (64, 64, 3)
    shares = coverage(scene, library, 8, 8)
    assert shares.shape == (2, 8, 8)
    assert shares[0, :, 4:].sum() < 0.1 * shares[0].sum()  # the left one is on the left
    assert shares[1, :, :4].sum() < 0.1 * shares[1].sum()
    empty = np.kron(shares.sum(0) == 0, np.ones((8, 8))).astype(bool)
    inner = empty & np.roll(empty, 4, 0) & np.roll(empty, -4, 0) & np.roll(empty, 4, 1) & np.roll(empty, -4, 1)  # fmt: skip
    assert (picture[inner] == scene.ground).mean() > 0.95
    assert (picture[~empty] == scene.ground).mean() < 0.8


@pytest.mark.parametrize("task", TASKS)
def test_one_option_is_right_and_three_are_wrong(library: Library, task: str) -> None:
    letters = Counter()
    for seed in range(80):
        rng = random.Random(seed)
        scene = make_scene(library, kind_for(task, rng), rng)
        choice = ask(scene, task, library, rng, near=0.5)
        letters[choice.letter] += 1
        texts = list(choice.options.values())
        assert len(set(texts)) == 4
        here = [one.cutout.name for one in scene.placed]
        if task == "colour":
            right = {scene.colour}
        elif task == "counting":
            right = {str(len(scene.placed))}
        elif task == "left_right":
            assert set(here) <= set(texts)  # the other side's thing is an option too
            right = {here["right" in choice.question]}
        else:
            right = set(here)
        assert [text for text in texts if text in right] == [choice.text]
    assert len(letters) == 4
    with pytest.raises(ConfigError, match="task: got 'smell'"):
        ask(scene, "smell", library, rng)


@pytest.mark.parametrize("task", ALBUM_TASKS)
def test_an_album_has_one_right_picture(library: Library, task: str) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        album = make_album(library, 8, rng)
        nouns = [scene.placed[0].cutout.caption.noun for scene in album]
        assert len(set(nouns)) == 8
        choice = ask_album(album, task, library, rng)
        if task == "album_find":
            number = int(choice.text.removeprefix("picture "))
            assert choice.question == f"Which picture shows {album[number - 1].placed[0].cutout.caption.phrase}?"  # fmt: skip
        else:
            number = int(choice.question.removeprefix("What is in picture ").removesuffix("?"))
            assert choice.text == album[number - 1].names[0]


def test_rolling_is_what_mmbench_does(library: Library, tmp_path: Path) -> None:
    items = list(make_items(library, seed=1, per_task=1))
    write_mmbench_tsv(tmp_path / "t.tsv", library, items, side=32)
    for item, question in zip(items, read_mmbench(tmp_path / "t.tsv").questions, strict=True):
        theirs = [(dict(one.options), one.answer) for one in roll([question])]
        assert theirs == [(dict(one.options), one.letter) for one in item.choice.rolled()]


def test_what_is_told_names_what_is_there(library: Library) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        scene = make_scene(library, rng.choice(KINDS), rng)
        said = tell(scene, rng)
        assert all(name in said.answer for name in scene.names)
        if said.task == "word":
            assert said.answer == scene.names[0]
        else:
            assert f" {scene.colour} background" in said.answer


@pytest.mark.parametrize("held_out", [False, True])
def test_a_file_asks_about_its_part_only_and_is_balanced(
    library: Library, tmp_path: Path, held_out: bool
) -> None:
    tasks = (*TASKS, *ALBUM_TASKS)
    items = list(make_items(library, seed=5, per_task=8, tasks=tasks, held_out=held_out, album=5))
    assert write_mmbench_tsv(tmp_path / "t.tsv", library, items, side=32) == 8 * len(tasks)
    file = read_mmbench(tmp_path / "t.tsv", strict=True)
    assert not file.bad_rows
    assert Counter(q.category for q in file.questions) == dict.fromkeys(tasks, 8)
    assert Counter(q.answer for q in file.questions) == dict.fromkeys("ABCD", 2 * len(tasks))
    other_part = set(library.names(not held_out))
    for item, question in zip(items, file.questions, strict=True):
        assert all(one.cutout.is_held_out == held_out for scene in item.scenes for one in scene.placed)  # fmt: skip
        assert not other_part & set(question.options.values())
        assert len(question.pictures) == len(item.scenes) == (5 if question.category in ALBUM_TASKS else 1)  # fmt: skip
        for scene, picture in zip(item.scenes, question.pictures, strict=True):
            assert np.array_equal(np.asarray(file.pictures.load(picture)), np.asarray(draw(scene, library, 32)))  # fmt: skip
    again = list(make_items(library, seed=5, per_task=8, tasks=tasks, held_out=held_out, album=5))
    assert again == items
    assert list(make_items(library, seed=6, per_task=8, held_out=held_out)) != items[: 8 * len(TASKS)]  # fmt: skip


def test_bad_requests_are_named(library: Library, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kind: got 'five'"):
        make_scene(library, "five", random.Random(0))
    with pytest.raises(ConfigError, match="task: got 'smell'"):
        list(make_items(library, seed=0, per_task=1, tasks=("smell",)))
    with pytest.raises(ConfigError, match="album: got 2"):
        list(make_items(library, seed=0, per_task=1, album=2))
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot write"):
        write_mmbench_tsv(tmp_path / "file" / "t.tsv", library, [], side=32)
