"""Images: kept once, decoded within Pillow's limits, every broken one a `PictureError`."""

import base64
import io
from pathlib import Path

import pytest
from PIL import Image

from oval_mm.pictures import PictureError, Pictures, blank, pad_square, read_picture


def png(size: tuple[int, int] = (3, 2), mode: str = "RGB", form: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, 1 if mode in ("1", "P", "L") else None).save(file, form)
    return file.getvalue()


def test_each_image_is_kept_once() -> None:
    pictures, text = Pictures(), base64.b64encode(png()).decode()
    names = [pictures.add(text), pictures.add(text), pictures.add("data:image/png;base64," + text)]
    assert (names[0] == names[1] != names[2], len(pictures)) == (True, 2)
    for name in names:
        assert (pictures.load(name).size, pictures.load(name).mode) == ((3, 2), "RGB")


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    assert read_picture(png(mode=mode)).mode == "RGB"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "cannot be read"),
        (b"no image at all" * 9, "cannot be read"),
        (png((64, 64))[:-30], "cannot be read"),
        (png((64, 64), form="JPEG")[:200], "cannot be read"),
        (png()[:20] + b"\xff" * 90, "cannot be read"),
    ],
)
def test_broken_images(data: bytes, problem: str) -> None:
    pictures = Pictures()
    with pytest.raises(PictureError, match=problem):
        pictures.load(pictures.add(base64.b64encode(data).decode()))


def test_what_is_not_base64() -> None:
    pictures = Pictures()
    with pytest.raises(PictureError, match="not base64"):
        pictures.load(pictures.add("A" * 65))


@pytest.mark.parametrize("pixels", [4095, 2047])
def test_pillows_limit_holds(monkeypatch: pytest.MonkeyPatch, pixels: int) -> None:
    """Pillow warns above its limit and raises above twice as much: both refuse the image here."""
    assert Image.MAX_IMAGE_PIXELS  # nothing of ours has taken it off
    data = png((64, 64))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pixels)
    with pytest.raises(PictureError, match="too large"):
        read_picture(data)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4096)
    assert read_picture(data).size == (64, 64)


def test_lines_of_pixels_are_refused() -> None:
    assert read_picture(png((200, 1))).size == (200, 1)
    for size in ((201, 1), (2, 402)):
        with pytest.raises(PictureError, match=f"the image is {size[0]} x {size[1]}"):
            read_picture(png(size))


def test_files(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    assert read_picture(tmp_path / "a.png").size == (3, 2)
    with pytest.raises(PictureError, match="cannot be read"):
        read_picture(tmp_path / "none.png")


def test_blank_and_square() -> None:
    image = Image.new("RGB", (4, 2), (0, 0, 0))
    image.paste((255, 255, 255), (0, 0, 2, 2))
    gray = blank(image)
    assert (gray.size, gray.getcolors()) == ((4, 2), [(8, (128, 128, 128))])
    square = pad_square(image, (1, 2, 3))
    assert square.size == (4, 4)
    assert [square.getpixel((1, y)) for y in range(4)] == [(1, 2, 3), (255,) * 3, (255,) * 3, (1, 2, 3)]  # fmt: skip
