"""Images that came as base64 text: each kept once, decoded when needed, within Pillow's limits. Writes nothing."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import struct
import warnings
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["PictureError", "Pictures", "blank", "pad_square", "read_picture"]

# what Pillow's decoders raise on broken files, beside OSError
_DECODER_ERRORS = (OSError, ValueError, TypeError, LookupError, SyntaxError, EOFError, OverflowError, struct.error, zlib.error)  # fmt: skip


MAX_ASPECT = 200
"""Longer side over shorter: processors scale the shorter side up, and a line of pixels would become gigabytes."""


class PictureError(ValueError):
    """An image cannot be read, or is larger than Pillow allows."""


class Pictures:
    """Base64 texts by name; a file that repeats an image in every row costs no more than one that refers to it."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def add(self, text: str) -> str:
        """Keeps an image; returns its name."""
        name = hashlib.sha256(text.encode()).hexdigest()
        self._texts.setdefault(name, text)
        return name

    def load(self, name: str) -> Image:
        """Returns the image [H, W, RGB].

        Raises:
            PictureError: not base64, not an image, cut off, or too large.
        """
        text = self._texts[name]
        if text.startswith("data:"):
            text = text.partition(",")[2]
        try:
            data = base64.b64decode(text)
        except (binascii.Error, ValueError) as error:
            raise PictureError(f"the image is not base64: {error}") from error
        return read_picture(data)

    def __len__(self) -> int:
        return len(self._texts)


def read_picture(source: bytes | Path) -> Image:
    """Returns an image [H, W, RGB] of a file's bytes, or of a file.

    Raises:
        PictureError: not an image, cut off, or too large.
    """
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
                _check_aspect(*image.size)
                return image.convert("RGB")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise PictureError(f"the image is too large: {error}") from error
    except PictureError:
        raise
    except _DECODER_ERRORS as error:
        raise PictureError(f"the image cannot be read: {error}") from error


def _check_aspect(width: int, height: int) -> None:
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise PictureError(
            f"the image is {width} x {height}; one side may be {MAX_ASPECT} times the other"
        )


def blank(image: Image) -> Image:
    """Returns an image of the same size in its mean colour: what a model knows without seeing."""
    from PIL import Image as Images

    mean = image.resize((1, 1), Images.Resampling.BOX).getpixel((0, 0))
    return Images.new("RGB", image.size, mean)


def pad_square(image: Image, colour: tuple[int, int, int]) -> Image:
    """Returns the image in the middle of a square of this colour, as LLaVA's own code prepares images."""
    from PIL import Image as Images

    width, height = image.size
    side = max(width, height)
    square = Images.new("RGB", (side, side), colour)
    square.paste(image, ((side - width) // 2, (side - height) // 2))
    return square
