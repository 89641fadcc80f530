"""What a router is trained on and how: every default of `oval train router`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from oval_core.config import check_int
from oval_core.errors import ConfigError, did_you_mean

LABELS = ("both", "mass", "output-error")


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterTraining:
    """Settings of one training.

    Attributes:
        model: what the router is for: an embedded name, a folder or a hub id.
        data: files with texts, see `oval_adapters.texts.passages`.
        out: folder for the router; checkpoints lie below it.
        recordings: folder of the recordings, which several trainings may share; None for one below `out`.
        kinds: sorts of passages.
        passages: of each kind, a tenth of them for validation.
        context: tokens of a prompt.
        steps: decode steps of a passage.
        label: what is predicted: attention `mass`, `output-error` (how far the output moves without a page), or `both`.
        leads: steps ahead, drawn in turn.
        budgets: shares of the text that the closed loop reads while data is gathered, drawn in turn.
        rounds: times that the closed loop is run again with the router as it is.
        updates: optimiser steps in all.
        learning_rate: at its highest.
        gamma: of the focal loss; 0 is cross-entropy, which ranks better (docs/claims.md).
        seed: of weights and draws, and of what is held out.
        data_seed: of the passages.
        layer_groups: selections a forward.
        dense_layers: layers that are not routed.
        page_size: tokens a page.
        router: settings of `RouterConfig` that differ from its defaults.
        save_every: updates between two checkpoints.
    """

    model: str
    data: tuple[str, ...]
    out: str
    recordings: str | None = None
    kinds: tuple[str, ...] = ("text", "retrieval", "chat")
    passages: int = 20
    context: int = 2048
    steps: int = 192
    label: str = "both"
    leads: tuple[int, ...] = (1, 4, 16)
    budgets: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4)
    rounds: int = 3
    updates: int = 1500
    learning_rate: float = 2e-3
    gamma: float = 0.0
    seed: int = 0
    data_seed: int = 0
    layer_groups: int = 3
    dense_layers: tuple[int, ...] = (0, 1)
    page_size: int = 16
    router: dict[str, Any] = field(default_factory=dict)
    save_every: int = 250

    def __post_init__(self) -> None:
        if self.label not in LABELS:
            raise ConfigError(f"label: got {self.label!r}; {did_you_mean(self.label, LABELS)}")
        if not self.data:
            raise ConfigError("data: got none. Allowed: one file or more. Name one.")
        for name, low in (
            ("passages", 2), ("context", 128), ("steps", 8), ("rounds", 1), ("updates", 1), ("save_every", 1)
        ):  # fmt: skip
            check_int(name, getattr(self, name), low, None)
        for lead in self.leads:
            check_int("leads", lead, 1, self.steps)
        if not self.leads or not all(0 < share <= 1 for share in self.budgets) or not self.budgets:
            raise ConfigError(
                f"leads, budgets: got {self.leads}, {self.budgets}. Allowed: one or more of each, budgets above 0 and up "
                "to 1. Give some."
            )

    @property
    def recordings_folder(self) -> Path:
        """Where recordings are kept."""
        return Path(self.out) / "recordings" if self.recordings is None else Path(self.recordings)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plain values."""
        return asdict(self)
