"""What was found in a folder of draft heads: the layout, what its keys say, what its config says against them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LAYOUTS = {
    "A": "Medusa v1 heads, own LM heads, .pt",
    "B": "Medusa v1 heads, own LM heads, safetensors (TGI V1)",
    "C": "Medusa heads on the shared LM head (TGI V2)",
    "D": "Medusa heads merged into the base's weights",
    "E": "vLLM",
    "oval": "OVAL",
}
_SHOWN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutReport:
    """What `load_heads` read.

    Attributes:
        layout: letter of the layout, or `oval`.
        files: names of the files that were read.
        kind: `medusa` or `sequential`.
        num_heads: K, by the keys.
        num_layers: layers of a head, by the keys.
        has_bias: whether their linear layers have one.
        has_own_lm_heads: whether each head has an LM head of its own; if not, the base's is used.
        num_draft_tokens: tokens of the draft vocabulary; None if all are drafted.
        said: what the config says about the heads, by its own names.
        contradictions: where it says otherwise than the keys, which are believed.
        ignored: keys that were not used.
        notes: what else a user should know.
        training: record of the training, where the file has one.
    """

    layout: str
    files: tuple[str, ...]
    kind: str
    num_heads: int
    num_layers: int
    has_bias: bool
    has_own_lm_heads: bool
    num_draft_tokens: int | None = None
    said: Mapping[str, Any] = field(default_factory=dict)
    contradictions: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    training: Mapping[str, Any] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Returns the report as lines to print."""
        said = ", ".join(f"{name} {value}" for name, value in self.said.items())
        tokens = self.num_draft_tokens
        lines = [
            f"layout {self.layout}: {LAYOUTS[self.layout]} ({', '.join(self.files)})",
            f"{self.num_heads} {self.kind} heads, {self.num_layers} layers each, "
            f"{'with' if self.has_bias else 'no'} bias",
            f"LM head: {'one a head' if self.has_own_lm_heads else 'shared with the base'}; drafts "
            f"{'all tokens' if tokens is None else f'{tokens} tokens'}",
            f"config says: {said or 'nothing about heads'}",
            *(f"but {line}" for line in self.contradictions),
            *self.notes,
        ]
        if self.ignored:
            more = len(self.ignored) - _SHOWN
            shown = ", ".join(self.ignored[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
            lines.append(f"ignored {len(self.ignored)} keys: {shown}")
        return lines
