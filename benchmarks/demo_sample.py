"""Makes what `oval demo` asks about: a picture and some questions in MMBench's form, of public-domain clip art.

    python benchmarks/demo_sample.py --pictures usr/share/openclipart/png --out assets/demo

The folder is the Debian package `openclipart-png` (0.18+dfsg), unpacked. The same command gives the same files.
"""

from __future__ import annotations

import argparse
import base64
import csv
import io
import json
import random
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

LETTERS = "ABCD"
COLUMNS = ("index", "question", "hint", *LETTERS, "answer", "category", "l2-category", "split", "image")  # fmt: skip
SIDE = 168
PICTURE_SIDE = 336
JPEG_QUALITY = 88

THINGS = {
    "apple": "food/fruit/apple.png",
    "banana": "food/fruit/banana.png",
    "bus": "transportation/vehicles/bus1_jarno_vasamaa_01.png",
    "cherry": "food/fruit/cherry_jonathan_dietrich_01.png",
    "cup": "food/beverages/teacup_ganson.png",
    "hammer": "tools/construction_hammer_jon__01.png",
    "hot dog": "food/meats_and_eggs/hot_dog.png",
    "lemon": "food/fruit/lemon.png",
    "orange": "food/fruit/orange.png",
    "pear": "food/fruit/pear.png",
    "pineapple": "food/fruit/pineapple.png",
    "scissors": "tools/scissors.png",
    "strawberry": "food/fruit/strawberry.png",
    "umbrella": "tools/umbrella.png",
}
GROUNDS = {"blue": (50, 90, 205), "green": (60, 160, 70), "grey": (130, 130, 130), "white": (246, 246, 246), "yellow": (240, 222, 60)}  # fmt: skip

ONE = ((0.08, 0.08, 0.84),)
TWO = ((0.03, 0.27, 0.46), (0.51, 0.27, 0.46))
FOUR = ((0.04, 0.04, 0.42), (0.54, 0.04, 0.42), (0.04, 0.54, 0.42), (0.54, 0.54, 0.42))

LICENCE = """The picture and the pictures in mmbench_sample.tsv are made of clip art of the Debian package openclipart-png
(0.18+dfsg), which its authors dedicated to the public domain (Creative Commons Public Domain Dedication, see the
package's copyright file; https://openclipart.org). The compositions, questions and answers are dedicated to the
public domain too (CC0-1.0). Made by benchmarks/demo_sample.py of:

"""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One question: what lies where, and the right option first."""

    category: str
    things: tuple[str, ...]
    ground: str
    question: str
    options: tuple[str, str, str, str]
    hint: str = ""


NAMING = "What is in the picture?"
EXISTENCE = "Which of these can be seen in the picture?"
COUNTING = "How many things are in the picture?"
COLOUR = "What colour is the background?"
ASKS = (
    Ask(category="naming", things=("banana",), ground="white", question=NAMING, options=("banana", "hammer", "bus", "cup")),
    Ask(category="naming", things=("umbrella",), ground="grey", question=NAMING, options=("umbrella", "pear", "scissors", "bus"), hint="It keeps the rain off."),
    Ask(category="naming", things=("bus",), ground="green", question=NAMING, options=("bus", "apple", "umbrella", "hot dog")),
    Ask(category="existence", things=("apple", "scissors", "cup"), ground="white", question=EXISTENCE, options=("scissors", "banana", "umbrella", "bus")),
    Ask(category="existence", things=("hammer", "lemon", "strawberry"), ground="blue", question=EXISTENCE, options=("lemon", "cherry", "hot dog", "cup")),
    Ask(category="existence", things=("pineapple", "bus", "pear"), ground="yellow", question=EXISTENCE, options=("pineapple", "apple", "scissors", "hammer")),
    Ask(category="counting", things=("apple", "apple", "apple"), ground="white", question=COUNTING, options=("3", "1", "2", "4")),
    Ask(category="counting", things=("strawberry", "strawberry"), ground="blue", question=COUNTING, options=("2", "1", "3", "4")),
    Ask(category="counting", things=("cherry",) * 4, ground="grey", question=COUNTING, options=("4", "1", "2", "3")),
    Ask(category="left_right", things=("orange", "hammer"), ground="white", question="What is on the left of the picture?", options=("orange", "hammer", "cup", "banana")),
    Ask(category="left_right", things=("cup", "umbrella"), ground="green", question="What is on the right of the picture?", options=("umbrella", "cup", "lemon", "bus")),
    Ask(category="left_right", things=("scissors", "pear"), ground="yellow", question="What is on the left of the picture?", options=("scissors", "pear", "hot dog", "apple")),
    Ask(category="colour", things=("hot dog",), ground="blue", question=COLOUR, options=("blue", "red", "green", "yellow")),
    Ask(category="colour", things=("apple", "pear"), ground="yellow", question=COLOUR, options=("yellow", "black", "purple", "grey")),
    Ask(category="colour", things=("lemon",), ground="green", question=COLOUR, options=("green", "white", "orange", "blue")),
)  # fmt: skip

PICTURE = Ask(category="picture", things=("banana", "umbrella"), ground="white", question="What is on the left of the picture?", options=("banana", "umbrella", "bus", "cup"))  # fmt: skip


def compose(ask: Ask, pictures: Path, side: int, rng: random.Random) -> Image.Image:
    """Returns the picture of a question."""
    shade = [min(255, max(0, part + rng.randint(-10, 10))) for part in GROUNDS[ask.ground]]
    picture = Image.new("RGB", (side, side), (shade[0], shade[1], shade[2]))
    spots = {1: ONE, 2: TWO}.get(len(ask.things), FOUR)
    is_named = ask.category in ("left_right", "picture")
    places = list(spots) if is_named else rng.sample(spots, len(ask.things))
    for thing, (x, y, size) in zip(ask.things, places, strict=False):
        cut = Image.open(pictures / THINGS[thing]).convert("RGBA")
        box = cut.getchannel("A").getbbox()
        cut = cut.crop(box) if box else cut
        scale = size * side * rng.uniform(0.85, 1.0) / max(cut.size)
        cut = cut.resize((max(1, round(cut.width * scale)), max(1, round(cut.height * scale))))
        room = size * side
        corner = (round(x * side + (room - cut.width) / 2), round(y * side + (room - cut.height) / 2))  # fmt: skip
        picture.paste(cut, corner, cut)
    return picture


def jpeg(picture: Image.Image) -> bytes:
    """Returns a picture as the bytes of a JPEG file."""
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=JPEG_QUALITY, optimize=True)
    return file.getvalue()


def row(index: int, ask: Ask, picture: Image.Image) -> list[str]:
    """Returns a row of the table, the right letter as often A as B, C and D."""
    step = index % len(LETTERS)
    options = [ask.options[(place - step) % 4] for place in range(4)]
    image = base64.b64encode(jpeg(picture)).decode("ascii")
    return [str(index), ask.question, ask.hint, *options, LETTERS[step], ask.category, "one picture", "demo", image]  # fmt: skip


def main() -> None:
    """Writes the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    table = given.out / "mmbench_sample.tsv"
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(COLUMNS)
        for index, ask in enumerate(ASKS):
            rng = random.Random(f"{given.seed}/{index}")
            writer.writerow(row(index, ask, compose(ask, given.pictures, SIDE, rng)))
    shown = compose(PICTURE, given.pictures, PICTURE_SIDE, random.Random(f"{given.seed}/picture"))
    (given.out / "picture.jpg").write_bytes(jpeg(shown))
    listed = "".join(f"{name}: {path}\n" for name, path in THINGS.items())
    (given.out / "LICENSE.txt").write_text(LICENCE + listed, encoding="utf-8")
    size = sum(path.stat().st_size for path in given.out.iterdir() if path.is_file())
    print(json.dumps({"questions": len(ASKS), "bytes": size, "seed": given.seed}))


if __name__ == "__main__":
    main()
