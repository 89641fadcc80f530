"""How draft heads are trained: every default of the loop."""

from __future__ import annotations

from dataclasses import dataclass

from oval_core.config import check_int
from oval_core.errors import ConfigError

PRECISIONS = ("bfloat16", "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadTrainingConfig:
    """Settings of the loop.

    Attributes:
        epochs: times that every position is seen.
        batch_size: positions an update.
        learning_rate: at its highest, in a cosine cycle.
        weight_decay: of AdamW.
        decay: weight of head k is this to the power k.
        soft_tokens: how many of the target's likeliest tokens, with their probabilities, are learnt at each position; 0
            learns the one token that it chose.
        regression: weight of the distance between a head's state and the hidden state that the target had there.
        precision: what matrices are multiplied in; weights and their updates are float32.
        validate_every: updates from a validation to the next.
        save_every: updates from a checkpoint to the next.
        seed: of weights and order.
    """

    epochs: int = 6
    batch_size: int = 512
    learning_rate: float = 3e-3
    weight_decay: float = 0.0
    decay: float = 0.8
    soft_tokens: int = 16
    regression: float = 1.0
    precision: str = "bfloat16"
    validate_every: int = 500
    save_every: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "validate_every", "save_every"):
            check_int(name, getattr(self, name), 1, None)
        check_int("soft_tokens", self.soft_tokens, 0, None)
        for name, least in (("learning_rate", 0.0), ("decay", 0.0)):
            value = getattr(self, name)
            if not least < value <= 1:
                raise ConfigError(
                    f"{name}: got {value!r}. Allowed: above 0, up to 1. Give such a number."
                )
        for name in ("weight_decay", "regression"):
            if not getattr(self, name) >= 0:
                raise ConfigError(
                    f"{name}: got {getattr(self, name)!r}. Allowed: 0 or more. Give such a number."
                )
        if self.precision not in PRECISIONS:
            raise ConfigError(
                f"precision: got {self.precision!r}. Allowed: {', '.join(PRECISIONS)}. Choose one."
            )
