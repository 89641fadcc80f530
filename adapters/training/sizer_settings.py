"""What a page sizer is trained on and how: every default of `oval train sizer`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from oval_core.config import MAX_PAGE_SIZE, check_int
from oval_core.errors import ConfigError

MIN_TRAINED_PAGE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SizerTraining:
    """Settings of one training.

    Attributes:
        model: what the sizer is for: an embedded name, a folder or a hub id.
        data: files with texts, see `oval_adapters.texts.passages`.
        out: folder with the trained router of this model; the sizer goes beside it.
        kinds: sorts of passages.
        passages: of each kind, a quarter of them for validation.
        context: tokens of a prompt.
        steps: decode steps whose attention is what pages are cut for.
        page_size: tokens that a page holds on average.
        num_sink_tokens: first tokens that do not count: they are read anyway.
        dense_layers: layers whose attention does not count: they read everything.
        updates: optimiser steps in all.
        learning_rate: at its highest.
        validate_every: updates from a validation to the next.
        seed: of data and order.
    """

    model: str
    data: tuple[str, ...]
    out: str
    kinds: tuple[str, ...] = ("text", "retrieval", "chat")
    passages: int = 8
    context: int = 1024
    steps: int = 64
    page_size: int = 16
    num_sink_tokens: int = 16
    dense_layers: tuple[int, ...] = (0, 1)
    updates: int = 300
    learning_rate: float = 1e-2
    validate_every: int = 25
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.data:
            raise ConfigError("data: got none. Allowed: one file or more. Name one.")
        for name, low, high in (
            ("passages", 2, None),
            ("context", 128, None),
            ("steps", 8, None),
            ("page_size", MIN_TRAINED_PAGE, MAX_PAGE_SIZE - 1),  # at 1 and 32 all pages are alike
            ("num_sink_tokens", 0, self.context - 1),
            ("updates", 1, None),
            ("validate_every", 1, None),
        ):
            check_int(name, getattr(self, name), low, high)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plain values."""
        return asdict(self)
