"""Region features of a CLIP tower by MaskCLIP's value path (arXiv 2112.01071): the last layer without its attention.

Where attention would mix patches, each keeps its own value, so what comes out still says where it was, and lies in
the joint space. Shapes: B images, N patches, H width, P pages, D of the joint space.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

__all__ = ["ValuePath"]

Step = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class ValuePath:
    """The parts of a tower's last layer and head that the path goes through; each maps [..., H] to [..., H].

    Attributes:
        attention_norm: before attention.
        value: projection to values.
        out: projection out of attention, layer scale included.
        mlp: feed-forward with the norm before it, layer scale included.
        head_norm: after the last layer.
        project: into the joint space, [..., H] to [..., D]; linear.
        has_residual: whether the layer's input is added and its feed-forward runs, as in MaskCLIP's ViT. Else the
            values alone go on, as in ClearCLIP (arXiv 2407.12442).
    """

    attention_norm: Step
    value: Step
    out: Step
    mlp: Step
    head_norm: Step
    project: Step
    has_residual: bool = True

    def __call__(self, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns embeddings [B, P, D] of length 1.

        Args:
            hidden: [B, N, H] what enters the last layer.
            weights: [P, N] share of each patch in each page.
        """
        states = self.out(self.value(self.attention_norm(hidden)))
        if self.has_residual:
            states = hidden + states
            states = states + self.mlp(states)
        states = self.head_norm(states)
        pooled = (
            weights.to(states) @ states
        )  # before the projection: it is linear, and pages are few
        return F.normalize(self.project(pooled), dim=-1)
