"""What the demo is asked and what it gives: plain values. Runs no model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

    from oval_adapters.page_report.report import ReadReport

__all__ = ["DONE", "FAILED", "SKIPPED", "Answer", "Bundled", "DemoSettings", "Part", "bundled", "demo_file", "says_the_same"]  # fmt: skip

DONE, FAILED, SKIPPED = "done", "failed", "skipped"
_ARTICLES = ("a", "an", "the")


def demo_file(name: str) -> Path:
    """Returns a file that ships for the demo."""
    return Path(str(resources.files("oval_adapters.assets"))) / "demo" / name


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundled:
    """What is known about the picture that ships. It was drawn, so it is known what it shows.

    Attributes:
        question: that is asked about it.
        answer: the right one, but for articles.
        shows: what is there, in words.
        tried: new pictures that were tried until the model described one rightly: this one.
        chosen_for: the model that did.
        seed: of the pictures.
    """

    question: str
    answer: str
    shows: str
    tried: int
    chosen_for: str
    seed: int


def says_the_same(answer: str, expected: str) -> bool:
    """Returns whether two texts have the same words in the same order; articles do not count."""
    first, second = (
        [word for word in text.lower().split() if word not in _ARTICLES]
        for text in (answer, expected)
    )
    return first == second


def bundled() -> Bundled:
    """Returns what is known about the picture that ships."""
    return Bundled(**json.loads(demo_file("picture.json").read_text(encoding="utf-8")))


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSettings:
    """How the demo runs.

    Attributes:
        text_model: embedded name, folder or hub id.
        vision_model: the same, of a LLaVA.
        question: about the picture; None asks what ships with it, of another picture for a description.
        picture: file; None takes the one that ships.
        dtype: of the weights.
        device: to run on.
        quick: fewer questions, prompts and tokens.
        fast_tokens: tokens that fast memory holds while the answer is made: so few that the rest really moves.
    """

    text_model: str = "smol"
    vision_model: str = "smol-llava"
    question: str | None = None
    picture: Path | None = None
    dtype: str = "auto"
    device: str = "auto"
    quick: bool = False
    fast_tokens: int = 64

    @property
    def answer_tokens(self) -> int:
        """Tokens of the answer, at most."""
        return 24 if self.quick else 48


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of the demo.

    Attributes:
        name: of it.
        state: `done`, `failed` or `skipped`.
        seconds: that it took, loading included.
        values: what it gave, ready for JSON.
        reason: why it failed or was skipped.
    """

    name: str
    state: str
    seconds: float = 0.0
    values: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, ready for JSON."""
        row = {"state": self.state, "seconds": round(self.seconds, 2), **self.values}
        return {**row, "reason": self.reason} if self.reason else row


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Answer:
    """An answer with what was read for it.

    Attributes:
        values: figures, ready for JSON.
        report: which pages each token read.
        pictures: as the model saw them.
    """

    values: Mapping[str, Any]
    report: ReadReport
    pictures: tuple[Image, ...] = ()
