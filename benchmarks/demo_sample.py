"""Makes what `oval demo` asks about: new scenes of emoji as a picture and as questions in MMBench's form.

    npm pack emoji-datasource-google@16.0.0 && tar xzf emoji-datasource-google-16.0.0.tgz
    python benchmarks/emoji_cutouts.py package google emoji/
    python benchmarks/demo_sample.py --pictures emoji --out assets/demo

The picture is the first of its seed that `--model` describes rightly, in float32 and in bfloat16, by Hugging Face's own
`generate`; picture.json says how many were tried. The questions are not chosen. The same command gives the same files;
`--number N` takes a picture without asking a model.
"""

import argparse
import csv
import io
import json
import random
from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from oval_adapters.demo.settings import says_the_same
from oval_adapters.models import resolve_model
from oval_mm.scenes import TASKS, Choice, Library, Scene, ask, draw, make_scene
from oval_mm.scenes.questions import LETTERS, kind_for

COLUMNS = ("index", "question", *LETTERS, "answer", "category", "l2-category", "split", "image")
SIDE = 168
PICTURE_SIDE = 336
JPEG_QUALITY = 88
QUESTION = "Describe the picture."
TRIES = 100

LICENCE = """The picture and the pictures in mmbench_sample.tsv are composed of emoji of Noto Emoji, copyright Google Inc.,
licensed under the Apache License, Version 2.0 (https://www.apache.org/licenses/LICENSE-2.0). They were taken from the
npm package emoji-datasource-google 16.0.0, cut out by benchmarks/emoji_cutouts.py, and changed: scaled, some mirrored,
laid on coloured grounds. The compositions, questions and answers are part of this project and have its licence,
Apache-2.0. The notes and prompts (notes.txt, prompts.jsonl) were written for this project. Made by
benchmarks/demo_sample.py, seed {seed}, of:

"""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The picture that was chosen.

    Attributes:
        scene: what is drawn.
        number: of the scene, of this seed.
        question: that is asked about it.
        answer: the right one.
    """

    scene: Scene
    number: int
    question: str
    answer: str


def candidate(library: Library, seed: int, number: int) -> Shown:
    """Returns a scene of one thing with its description."""
    rng = random.Random(f"demo/{seed}/{number}")
    scene = make_scene(library, "one", rng)
    answer = f"The picture shows {describe(scene)}."
    return Shown(scene=scene, number=number, question=QUESTION, answer=answer)


def describe(scene: Scene) -> str:
    """Returns what is there, in the words of `oval_mm.scenes.tell`, and with articles."""
    cutout = scene.placed[0].cutout
    phrase = cutout.caption.phrase
    if phrase == cutout.name and not phrase.endswith("s"):
        phrase = f"{_article(phrase)} {phrase}"
    return f"{phrase} on {_article(scene.colour)} {scene.colour} background"


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def jpeg(picture: Image.Image) -> bytes:
    """Returns a picture as the bytes of a JPEG file."""
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=JPEG_QUALITY, optimize=True)
    return file.getvalue()


class Describer:
    """A LLaVA of Hugging Face, in two dtypes."""

    def __init__(self, name: str) -> None:
        path = resolve_model(name)
        self._processor = AutoProcessor.from_pretrained(path)
        self._models = [
            AutoModelForImageTextToText.from_pretrained(path, dtype=dtype).eval()
            for dtype in (torch.float32, torch.bfloat16)
        ]

    def is_right(self, picture: Image.Image, shown: Shown) -> bool:
        """Returns whether both answers are the right one, word for word but for articles."""
        content = [{"type": "image"}, {"type": "text", "text": shown.question}]
        text = self._processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        inputs = self._processor(images=[picture], text=text, return_tensors="pt")
        return all(says_the_same(self._answer(model, inputs), shown.answer) for model in self._models)  # fmt: skip

    def _answer(self, model: Any, inputs: Any) -> str:
        out = model.generate(**inputs.to(model.dtype), do_sample=False, max_new_tokens=40)
        width = inputs["input_ids"].shape[1]
        answer: str = self._processor.tokenizer.decode(out[0, width:], skip_special_tokens=True)
        return answer.strip()


def choose(library: Library, seed: int, model: str) -> tuple[Shown, bytes]:
    """Returns the first scene that a model describes rightly, and its file."""
    describer = Describer(model)
    for number in range(TRIES):
        shown = candidate(library, seed, number)
        data = jpeg(draw(shown.scene, library, PICTURE_SIDE))
        if describer.is_right(Image.open(io.BytesIO(data)).convert("RGB"), shown):
            return shown, data
    raise SystemExit(f"{model} describes none of {TRIES} scenes rightly: give another --seed")


def questions(library: Library, seed: int, per_task: int) -> list[tuple[Scene, Choice]]:
    """Returns questions of each task in turn, the right letter as often A as B, C and D."""
    found = []
    for index in range(per_task * len(TASKS)):
        task = list(TASKS)[index % len(TASKS)]
        rng = random.Random(f"demo questions/{seed}/{index}")
        scene = make_scene(library, kind_for(task, rng), rng)
        turns = ask(scene, task, library, rng).rolled()
        letter = LETTERS[index % len(LETTERS)]
        found.append((scene, next(turn for turn in turns if turn.letter == letter)))
    return found


def write_table(path: Path, library: Library, asked: list[tuple[Scene, Choice]]) -> None:
    """Writes the questions in MMBench's form."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(COLUMNS)
        for index, (scene, choice) in enumerate(asked):
            image = b64encode(jpeg(draw(scene, library, SIDE))).decode("ascii")
            options = [choice.options[letter] for letter in LETTERS]
            writer.writerow([index, choice.question, *options, choice.letter, choice.task, "one picture", "demo", image])  # fmt: skip


def main() -> None:
    """Writes the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--split-seed", type=int, default=0, help="that of the training")
    parser.add_argument("--per-task", type=int, default=3)
    parser.add_argument("--model", default="smol-llava")
    parser.add_argument("--number", type=int, help="of the scene: asks no model")
    given = parser.parse_args()
    library = Library(given.pictures, given.split_seed)
    if given.number is None:
        shown, data = choose(library, given.seed, given.model)
    else:
        shown = candidate(library, given.seed, given.number)
        data = jpeg(draw(shown.scene, library, PICTURE_SIDE))
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "picture.jpg").write_bytes(data)
    facts = {
        "question": shown.question,
        "answer": shown.answer,
        "shows": describe(shown.scene),
        "tried": shown.number + 1,
        "chosen_for": given.model,
        "seed": given.seed,
    }
    (given.out / "picture.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    asked = questions(library, given.seed, given.per_task)
    write_table(given.out / "mmbench_sample.tsv", library, asked)
    scenes = [shown.scene, *(scene for scene, _ in asked)]
    used = sorted({(one.cutout.name, one.cutout.path.stem) for scene in scenes for one in scene.placed})  # fmt: skip
    listed = "".join(f"{name}: {stem}\n" for name, stem in used)
    (given.out / "LICENSE.txt").write_text(LICENCE.format(seed=given.seed) + listed, encoding="utf-8")  # fmt: skip
    size = sum(path.stat().st_size for path in given.out.iterdir() if path.is_file())
    print(json.dumps({"questions": len(asked), "bytes": size, "tried": facts["tried"]}))


if __name__ == "__main__":
    main()
