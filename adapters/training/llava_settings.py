"""How a small LLaVA is trained: every default of `oval train projector` and `oval train llava`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from oval_core.config import check_int
from oval_core.errors import ConfigError, did_you_mean

__all__ = ["ANSWERS", "STAGES", "LlavaTraining"]

STAGES = ("projector", "llava")
ANSWERS = ("letter", "text")


@dataclass(frozen=True, kw_only=True, slots=True)
class LlavaTraining:
    """Settings of one training. All sizes of the data are bounds: scenes are made as they are needed.

    Attributes:
        stage: `projector` trains it alone before a frozen decoder; `llava` trains it with low-rank additions.
        pictures: folders of captioned cut-outs.
        out: folder of the weights; checkpoint and features lie there too.
        model: the decoder: `smol`, or a folder of another Llama with a spare token.
        vision: the tower: `dinov2-small`, or a folder of another DINOv2.
        steps: updates; None where `minutes` ends it.
        minutes: time of all runs together, alignment not counted; or None.
        init: folder of weights to go on from, or None.
        align_pictures: scenes that the projector is first aligned on, with words for what patches show; 0 for none.
        align_updates: updates of that.
        scenes: different pictures; later updates see them again with other questions.
        batch: pictures an update.
        questions: questions a picture.
        albums: share of the updates, in the second half, that ask about albums.
        album: pictures of an album.
        rank: of the additions.
        lora_rate: learning rate of the additions.
        projector_rate: learning rate of the projector.
        choice_answer: what answers the prompt that asks for a letter: `letter`, or `text` of the option.
        seed: of scenes, questions and weights.
        split_seed: of which things are held out.
        validation: questions of each sort to judge by, and as many of things that are never trained on.
        validate_every: updates from a validation to the next.
        save_every: updates from a checkpoint to the next.
        sources: where the pictures are from, with their licences, for the record.
    """

    stage: str
    pictures: tuple[str, ...]
    out: str
    model: str = "smol"
    vision: str = "dinov2-small"
    steps: int | None = None
    minutes: float | None = None
    init: str | None = None
    align_pictures: int = 3000
    align_updates: int = 800
    scenes: int = 12000
    batch: int = 6
    questions: int = 6
    albums: float = 0.12
    album: int = 8
    rank: int = 16
    lora_rate: float = 1e-3
    projector_rate: float = 5e-4
    choice_answer: str = "letter"
    seed: int = 0
    split_seed: int = 0
    validation: int = 24
    validate_every: int = 100
    save_every: int = 50
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ConfigError(f"stage: got {self.stage!r}; {did_you_mean(self.stage, STAGES)}")
        if self.choice_answer not in ANSWERS:
            raise ConfigError(
                f"choice_answer: got {self.choice_answer!r}; {did_you_mean(self.choice_answer, ANSWERS)}"
            )
        if not self.pictures:
            raise ConfigError("pictures: got none. Allowed: folders with NAME.png beside NAME.txt. Name one.")  # fmt: skip
        if (self.steps is None) == (self.minutes is None):
            raise ConfigError(
                f"steps: got steps {self.steps} and minutes {self.minutes}. Allowed: one of them. Give --steps or --minutes."
            )
        for name in ("scenes", "batch", "rank", "validate_every", "save_every", "validation"):
            check_int(name, getattr(self, name), 1, None)
        check_int("questions", self.questions, 2, None)
        check_int("album", self.album, 4, None)
        for name in ("align_pictures", "align_updates"):
            check_int(name, getattr(self, name), 0, None)
        if self.steps is not None:
            check_int("steps", self.steps, 1, None)
        for name in ("lora_rate", "projector_rate", "minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}: got {value!r}. Allowed: above 0. Give such a number.")
        if not 0 <= self.albums <= 1:
            raise ConfigError(f"albums: got {self.albums!r}. Allowed: 0 to 1. Give such a share.")

    def to_dict(self) -> dict[str, Any]:
        """Returns the plain values."""
        return asdict(self)
