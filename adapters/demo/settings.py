"""What the demo is asked and what it gives: plain values. Runs no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

    from oval_adapters.page_report.report import ReadReport

__all__ = ["DONE", "FAILED", "SKIPPED", "Answer", "DemoSettings", "Part", "demo_file"]

DONE, FAILED, SKIPPED = "done", "failed", "skipped"


def demo_file(name: str) -> Path:
    """Returns a file that ships for the demo."""
    return Path(str(resources.files("oval_adapters.assets"))) / "demo" / name


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSettings:
    """How the demo runs.

    Attributes:
        text_model: embedded name, folder or hub id.
        vision_model: the same, of a LLaVA.
        question: about the picture; None asks for a description.
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
