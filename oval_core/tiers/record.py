"""How a page lies in a slow tier: layer after layer; a layer's *chunk* is K [K, n, D], then V [K, n, E].

    record = [ layer 0: K V ][ layer 1: K V ] ...

Chunks of several pages are brought to a buffer as one K [K, S, D] and one V [K, S, E], as a pool has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from oval_core.kv_pool import LayerStore
from oval_core.native.chunk_io import ChunkShape


@dataclass(frozen=True, slots=True)
class LayerShape:
    """K and V of one token in one layer: K KV heads, D and E head dims."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> LayerShape:
        """Reads the shape off keys [..., K, tokens, D] and values [..., K, tokens, E]."""
        return cls(keys.shape[-3], keys.shape[-1], values.shape[-1], keys.dtype)

    @property
    def in_bytes(self) -> ChunkShape:
        """The shape as those see it who move bytes."""
        size = self.dtype.itemsize
        return ChunkShape(self.kv_heads, self.key_dim * size, self.value_dim * size)

    @property
    def token_bytes(self) -> int:
        """Bytes a token takes."""
        return self.in_bytes.token_bytes


class RecordLayout:
    """Offsets of the chunks of a record of n tokens, for some layers in order."""

    def __init__(self, shapes: Sequence[LayerShape]) -> None:
        self.shapes = tuple(shapes)

    @property
    def num_layers(self) -> int:
        """Layers of a record."""
        return len(self.shapes)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return sum(shape.token_bytes for shape in self.shapes)

    @cached_property
    def _before(self) -> list[int]:
        return [sum(s.token_bytes for s in self.shapes[:i]) for i in range(self.num_layers)]

    def bytes_before(self, index: int) -> int:
        """Bytes that a token takes in the layers before layer `index`."""
        return self._before[index]

    def chunk(self, index: int, num_tokens: int) -> slice:
        """Returns the bytes of layer `index` (a place in `shapes`) within a record."""
        start = self._before[index] * num_tokens
        return slice(start, start + self.shapes[index].token_bytes * num_tokens)


def pack(num_pages: int, keys: torch.Tensor, values: torch.Tensor) -> np.ndarray:
    """Returns keys [K, P * n, D] and values [K, P * n, E] of P pages of n tokens as chunks, uint8 [P, bytes]."""
    sides = [
        side.view(side.shape[0], num_pages, -1).transpose(0, 1).flatten(1)  # [P, K * n * D]
        for side in (keys, values)
    ]
    return torch.cat(sides, 1).cpu().view(torch.uint8).numpy()


def unpack(shape: LayerShape, chunk: torch.Tensor) -> LayerStore:
    """Returns K [K, n, D] and V [K, n, E] as views of n tokens, uint8 [bytes]."""
    numbers = chunk.view(shape.dtype)
    count = chunk.shape[0] // shape.token_bytes
    split = shape.kv_heads * count * shape.key_dim
    return LayerStore(
        numbers[:split].view(shape.kv_heads, count, shape.key_dim),
        numbers[split:].view(shape.kv_heads, count, shape.value_dim),
    )
