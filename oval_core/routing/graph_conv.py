"""One layer of a graph convolution (Kipf and Welling, arXiv 1609.02907). Knows no pages, only rows and an adjacency.

Shapes: P rows, E features in, E' features out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from oval_core.config import check_int
from oval_core.errors import ConfigError


class GraphConv(nn.Module):
    """activation(A X W + b), where A is normalised already. A sparse A is never made dense."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        activation: Callable[[torch.Tensor], torch.Tensor] = torch.relu,
    ) -> None:
        """Makes the layer.

        Args:
            in_features: E.
            out_features: E'.
            activation: applied to every element at the end.
        """
        super().__init__()
        check_int("in_features", in_features, 1, None)
        check_int("out_features", out_features, 1, None)
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))
        self.activation = activation
        nn.init.xavier_uniform_(self.weight)

    def forward(self, features: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        """Returns [..., P, E'].

        Args:
            features: [..., P, E]; leading dimensions share the adjacency.
            adjacency: [P, P], sparse or dense, of any float dtype (`CooccurrenceGraph.adjacency`).
        """
        rows = features.shape[-2] if features.ndim > 1 else -1
        if features.shape[-1] != self.weight.shape[0] or adjacency.shape != (rows, rows):
            raise ConfigError(
                f"graph convolution: got features {list(features.shape)} with adjacency {list(adjacency.shape)}. "
                f"Allowed: [..., P, {self.weight.shape[0]}] with [P, P]. Give one row of features a page."
            )
        mixed = _aggregate(adjacency, features @ self.weight)
        out: torch.Tensor = self.activation(mixed + self.bias)
        return out


def _aggregate(adjacency: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Returns A X for X [..., P, E]."""
    if adjacency.layout == torch.strided:
        return adjacency.to(features) @ features
    # a sparse product takes one matrix, and no half precision on every device: columns are all of [..., E], float32
    dtype = torch.promote_types(features.dtype, torch.float32)
    columns = features.movedim(-2, 0)
    product: torch.Tensor = torch.sparse.mm(
        adjacency.to(features.device, dtype), columns.flatten(1).to(dtype)
    )
    return product.view(columns.shape).movedim(0, -2).to(features.dtype)
