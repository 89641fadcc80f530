"""Captions made plain, and the split: what is held out is never among what is trained on."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tiny_scenes import NAMES, save_cutouts

from oval_core.errors import ConfigError
from oval_mm.scenes import Library, read_caption
from oval_mm.scenes.captions import is_held_out
from oval_mm.scenes.library import MAX_SIDE


@pytest.mark.parametrize(
    ("text", "name", "phrase", "noun"),
    [
        ("A kettle.\nUne bouilloire.", "kettle", "a kettle", "kettle"),
        ("The Golden apple, a fruit.", "golden apple", "a golden apple", "apple"),
        ("The elk.", "elk", "an elk", "elk"),
        ("Cherries", "cherries", "cherries", "cherry"),
        ("Another bunch of grapes.", "bunch of grapes", "a bunch of grapes", "bunch"),
        ("Some foxes (wild).", "foxes", "some foxes", "fox"),
        ("A bus", "bus", "a bus", "bus"),
        ("A jack-o\u2019-lantern!", "jack-o'-lantern", "a jack-o'-lantern", "jack-o'-lantern"),
    ],
)
def test_a_caption_becomes_a_name(text: str, name: str, phrase: str, noun: str) -> None:
    caption = read_caption(text)
    assert caption is not None
    assert (caption.name, caption.phrase, caption.noun) == (name, phrase, noun)


@pytest.mark.parametrize(
    "text",
    ["", "\n", "A stethoscope lets your doctor listen", "It's a cep.", "Two wild boars", "No. 5", "x", "A dog with", "Enter the cave"],
)  # fmt: skip
def test_what_is_no_name_is_refused(text: str) -> None:
    assert read_caption(text) is None


@given(st.text("aehnst '.,-AT\n5", max_size=40))
def test_any_text_gives_a_usable_name_or_none(text: str) -> None:
    caption = read_caption(text)
    assert caption is None or (2 < len(caption.name) <= 26 and caption.noun and "\n" not in caption.phrase)  # fmt: skip


def test_the_split_takes_a_share_of_the_nouns() -> None:
    nouns = [f"noun{number}" for number in range(4000)]
    held = [is_held_out(noun, 0) for noun in nouns]
    assert 0.17 < sum(held) / len(held) < 0.23
    assert held != [is_held_out(noun, 1) for noun in nouns]


def test_kinds_of_a_held_out_thing_are_never_known(tmp_path: Path) -> None:
    save_cutouts(tmp_path)
    held = next(name for name in NAMES if is_held_out(name, 0))
    known = next(name for name in NAMES if not is_held_out(name, 0))
    for stem, caption in (("kind", f"Green {held}"), ("beside", f"{held}s {known}"), ("other", f"red {known}")):  # fmt: skip
        Image.new("RGBA", (8, 8), "red").save(tmp_path / f"{stem}.png")
        (tmp_path / f"{stem}.txt").write_text(caption, encoding="utf-8")
    library = Library([tmp_path])
    assert f"green {held}" in library.names(True)  # another kind of it goes with it
    everything = set(library.names(True)) | set(library.names(False))
    assert f"{held}s {known}" not in everything  # it would tell of what is held out
    assert f"red {known}" in library.names(False)
    held_nouns = {cutout.caption.noun for cutout in library.held_out}
    assert held_nouns
    for cutout in library.known:
        assert not held_nouns & set(cutout.caption.words)


def test_symbols_mirrors_and_pictures_without_a_caption_are_skipped(tmp_path: Path) -> None:
    save_cutouts(tmp_path)
    before = len(Library([tmp_path]).known), len(Library([tmp_path]).held_out)
    (tmp_path / "symbols").mkdir()
    for stem in ("symbols/letter", "zebra_mirror", "nameless"):
        Image.new("RGBA", (8, 8)).save(tmp_path / f"{stem}.png")
        if stem != "nameless":
            (tmp_path / f"{stem}.txt").write_text("A zebra", encoding="utf-8")
    after = Library([tmp_path])
    assert (len(after.known), len(after.held_out)) == before


def test_pictures_lose_borders_and_size(tmp_path: Path) -> None:
    save_cutouts(tmp_path)
    library = Library([tmp_path])
    assert library.image(library.known[0]).size == (20, 16)  # of 24 x 20, the rest is empty
    path = library.known[1].path
    Image.new("RGB", (4000, 10), "red").save(path)
    fresh = Library([tmp_path])
    image = fresh.image(next(cutout for cutout in fresh.known if cutout.path == path))
    assert image.width == MAX_SIDE
    assert image.height >= MAX_SIDE // 5 - 1


def test_bad_folders_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        Library([tmp_path / "none"])
    save_cutouts(tmp_path, NAMES[:6])
    with pytest.raises(ConfigError, match=r"got \d+ things to train on and \d+ held out"):
        Library([tmp_path])
    save_cutouts(tmp_path)
    library = Library([tmp_path])
    library.known[0].path.write_bytes(b"no picture")
    with pytest.raises(ConfigError, match=f"cannot read .*{library.known[0].path.name}"):
        library.image(library.known[0])
