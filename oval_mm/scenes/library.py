"""Folders of captioned pictures (NAME.png beside NAME.txt) as cut-outs to compose scenes of. Draws nothing."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oval_core.errors import ConfigError
from oval_mm.scenes.captions import Caption, is_held_out, read_caption

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Cutout", "Library"]

SKIPPED = ("symbols", "mirror", "flip")
"""Folders, and parts of file names, that hold no things: letters, coins, and pictures that are there twice."""

MAX_SIDE = 192
"""Cut-outs are kept so large: scenes are small, and originals have up to thousands of pixels a side."""

MAX_ASPECT = 5
LEAST = 12
"""Different things that each part of the split must have: options are four, and none may be in the scene."""


@dataclass(frozen=True, slots=True)
class Cutout:
    """One picture of a thing.

    Attributes:
        path: of the picture, RGBA or any other that Pillow reads.
        caption: what it shows.
        kind: name of the folder that it lies in, below the library's own.
        is_held_out: whether it is never trained on.
    """

    path: Path
    caption: Caption
    kind: str
    is_held_out: bool

    @property
    def name(self) -> str:
        """The thing's name."""
        return self.caption.name


class Library:
    """The cut-outs of some folders, split once by their nouns. What names a held-out thing beside another is left out.

    Args:
        folders: searched with all that lies below them.
        seed: of the split, and of nothing else.

    Raises:
        ConfigError: no such folder, or too few captioned pictures in it.
    """

    def __init__(self, folders: Sequence[str | Path], seed: int = 0) -> None:
        self.folders, self.seed = tuple(Path(folder).expanduser() for folder in folders), seed
        found = [cutout for folder in self.folders for cutout in _cutouts(folder, seed)]
        self.held_out = tuple(cutout for cutout in found if cutout.is_held_out)
        never = {cutout.caption.noun for cutout in self.held_out}
        # "spider web" is left out altogether where "spider" is held out: it would tell of it
        self.known = tuple(
            cutout
            for cutout in found
            if not cutout.is_held_out and not never & set(cutout.caption.words)
        )
        few = [len({c.caption.noun for c in part}) for part in (self.known, self.held_out)]
        if min(few) < LEAST:
            raise ConfigError(
                f"pictures: got {few[0]} things to train on and {few[1]} held out in "
                f"{', '.join(map(str, folders))}. Allowed: {LEAST} or more of each, as NAME.png beside NAME.txt with a "
                "short caption. Name more folders."
            )
        self._image = functools.lru_cache(maxsize=None)(_load)

    def part(self, held_out: bool) -> tuple[Cutout, ...]:
        """Returns the cut-outs that are held out, or the others."""
        return self.held_out if held_out else self.known

    def names(self, held_out: bool) -> tuple[str, ...]:
        """Returns the different names of one part, in the order of the alphabet."""
        return tuple(sorted({cutout.name for cutout in self.part(held_out)}))

    def image(self, cutout: Cutout) -> Image:
        """Returns a cut-out [H, W, RGBA] without empty borders, its longer side `MAX_SIDE` at most; do not change it.

        Raises:
            ConfigError: the file is no picture that Pillow reads within its limits.
        """
        return self._image(cutout.path)


def _cutouts(folder: Path, seed: int) -> Iterator[Cutout]:
    if not folder.is_dir():
        raise ConfigError(
            f"pictures: no such folder {folder}. Allowed: one with NAME.png beside NAME.txt, at any depth. Check the path."
        )
    for path in sorted(folder.rglob("*.png")):
        inside = path.relative_to(folder)
        if set(SKIPPED) & set(inside.parts[:-1]) or any(part in path.stem for part in SKIPPED):
            continue
        text = path.with_suffix(".txt")
        if not text.is_file():
            continue
        caption = read_caption(text.read_text(encoding="utf-8", errors="replace"))
        if caption is not None:
            kind = "/".join(inside.parts[:-1][:2])
            yield Cutout(path, caption, kind, is_held_out(caption.noun, seed))


def _load(path: Path) -> Image:
    from PIL import Image as Images

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Images.DecompressionBombWarning)
            with Images.open(path) as opened:
                image = opened.convert("RGBA")
    except (OSError, ValueError, SyntaxError, Images.DecompressionBombError, Images.DecompressionBombWarning) as error:  # fmt: skip
        raise ConfigError(
            f"pictures: cannot read {path}: {error}. Allowed: pictures that Pillow reads. Mend it, or take it away."
        ) from error
    box = image.getchannel("A").getbbox()
    if box is not None:
        image = image.crop(box)
    longest = max(image.size)
    least = max(1, longest // MAX_ASPECT)
    if min(image.size) < least:  # a line of pixels: widened, so that something of it is seen
        image = image.resize((max(image.width, least), max(image.height, least)))
    if longest > MAX_SIDE:
        image.thumbnail((MAX_SIDE, MAX_SIDE))
    return image
