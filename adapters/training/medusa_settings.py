"""What draft heads are trained on and which heads: every default of `oval train medusa` that is not the loop's."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from oval_core.config import check_int
from oval_core.errors import ConfigError, did_you_mean
from oval_spec.training.config import HeadTrainingConfig

KINDS = ("independent", "sequential")
LAYOUTS = ("C", "E")
SELF = "self"


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaTraining:
    """Settings of one training.

    Attributes:
        model: what the heads draft for: an embedded name, a folder or a hub id.
        data: files with prompts, folders of answers that an earlier run left, or `self`.
        out: folder of the heads; checkpoint, answers and log lie there too.
        kind: `independent` (Medusa) or `sequential`.
        heads: K.
        form: of sequential heads, see `SequentialHeads`.
        mlp_size: of sequential heads.
        layers: MLPs, or residual layers, of a head.
        cells: of recurrent heads: cells that are not shared.
        gated: whether sequential heads gate their MLPs.
        sees_hidden: whether recurrent cells see the first hidden state at every step.
        context: tokens before the root that sequential heads see.
        vocabulary: draft tokens; 0 for all of the model's.
        prompts: that `self` writes.
        limit: prompts of each file; None for all.
        max_new_tokens: of an answer.
        answer_batch: prompts that are answered at once.
        held_out: share of the prompts to judge by.
        layouts: also write independent heads as these.
        loop: settings of the loop.
    """

    model: str
    data: tuple[str, ...]
    out: str
    kind: str = "sequential"
    heads: int = 4
    form: str = "recurrent"
    mlp_size: int = 1536
    layers: int = 1
    cells: int = 1
    gated: bool = False
    sees_hidden: bool = False
    context: int = 4
    vocabulary: int = 8192
    prompts: int = 1024
    limit: int | None = None
    max_new_tokens: int = 128
    answer_batch: int = 64
    held_out: float = 0.05
    layouts: tuple[str, ...] = ()
    loop: HeadTrainingConfig = field(default_factory=HeadTrainingConfig)

    def __post_init__(self) -> None:
        if not self.data:
            raise ConfigError(
                "data: got none. Allowed: self, a file with prompts, a folder of answers. Name one."
            )
        if self.kind not in KINDS:
            raise ConfigError(f"kind: got {self.kind!r}; {did_you_mean(self.kind, KINDS)}")
        for name in ("heads", "mlp_size", "layers", "cells", "prompts", "max_new_tokens", "answer_batch"):  # fmt: skip
            check_int(name, getattr(self, name), 1, None)
        check_int("context", self.context, 0, None)
        check_int("vocabulary", self.vocabulary, 0, None)
        if self.limit is not None:
            check_int("limit", self.limit, 1, None)
        if not 0 < self.held_out < 1:
            raise ConfigError(
                f"held_out: got {self.held_out!r}. Allowed: above 0, below 1. Give such a share."
            )
        for layout in self.layouts:
            if layout not in LAYOUTS:
                raise ConfigError(f"layout: got {layout!r}; {did_you_mean(layout, LAYOUTS)}")
        if self.layouts and self.kind != "independent":
            raise ConfigError(
                f"layout: got {', '.join(self.layouts)} with {self.kind} heads. Allowed: these layouts hold independent "
                "heads only. Train with --kind independent, or leave the layout out."
            )

        if "C" in self.layouts and (self.vocabulary or self.layers != 1):
            raise ConfigError(
                f"layout: got C with vocabulary {self.vocabulary} and {self.layers} layers. Allowed: vocabulary 0 and 1 "
                "layer, which is all that layout C holds. Set these, or write layout E."
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns the plain values."""
        return asdict(self)

    def head_settings(self, hidden_size: int) -> tuple[str, dict[str, Any]]:
        """Returns kind and settings for `create_heads`."""
        values: dict[str, Any] = {"num_heads": self.heads, "hidden_size": hidden_size}
        values["num_layers"] = self.layers
        if self.kind == "independent":
            return "medusa", values
        return "sequential", values | {
            "form": self.form,
            "mlp_size": self.mlp_size,
            "num_cells": self.cells,
            "is_gated": self.gated,
            "sees_hidden": self.sees_hidden,
            "context": self.context,
        }
