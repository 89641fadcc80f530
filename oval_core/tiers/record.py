"""How a page lies in a slow tier: layer after layer; in a layer token after token; of a token keys, then values.

    record = [ layer 0: | k v | k v | ... | ][ layer 1: ... ] ...

A layer of a record (a *chunk*) read into a buffer is K and V with strides: no second copy is needed to attend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from oval_core.kv_pool import LayerStore


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
    def token_elements(self) -> int:
        """Numbers a token takes."""
        return self.kv_heads * (self.key_dim + self.value_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes a token takes."""
        return self.token_elements * self.dtype.itemsize


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
    tokens = torch.cat([keys.transpose(0, 1).flatten(1), values.transpose(0, 1).flatten(1)], 1)
    return tokens.cpu().view(torch.uint8).view(num_pages, -1).numpy()


def unpack(shape: LayerShape, chunk: torch.Tensor) -> LayerStore:
    """Returns K [K, n, D] and V [K, n, E] as views of n tokens of chunks, uint8 [bytes]."""
    numbers = chunk.view(shape.dtype)
    count = numbers.shape[0] // shape.token_elements
    k = shape.kv_heads * shape.key_dim

    def view(first: int, dim: int) -> torch.Tensor:
        return numbers.as_strided(
            (shape.kv_heads, count, dim),
            (dim, shape.token_elements, 1),
            numbers.storage_offset() + first,
        )

    return LayerStore(view(0, shape.key_dim), view(k, shape.value_dim))
