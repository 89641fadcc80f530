"""Keeps the features of the last images by their content: an image that comes again is not encoded again.

Shapes: n tokens of an image, C the decoder's hidden size, D the vision tower's.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass

import torch

from oval_mm.spans import Grid

__all__ = ["FeatureCache", "ImageFeatures", "image_key", "weights_stamp"]

_PROBES = 8
"""Numbers of a tensor that are looked at."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageFeatures:
    """What one image became.

    Attributes:
        features: [n, C] projected, one for each of its tokens.
        hidden: [n, D] states of the vision tower behind them; None where they are not one to one.
        views: the grids that its tokens are, in order.
        pixels: what the tower read of it; None unless somebody asked for it.
    """

    features: torch.Tensor
    hidden: torch.Tensor | None
    views: tuple[Grid, ...]
    pixels: torch.Tensor | None = None


class FeatureCache:
    """The last images that were used, at most `capacity` of them. Threads may share it."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[bytes, ImageFeatures] = OrderedDict()
        self._stamp: object = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def check(self, stamp: object) -> None:
        """Forgets everything if the weights are not those of the last call."""
        with self._lock:
            if stamp != self._stamp:
                self._kept.clear()
                self._stamp = stamp

    def get(self, key: bytes) -> ImageFeatures | None:
        """Returns what an image became, or None."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def put(self, key: bytes, found: ImageFeatures) -> None:
        """Keeps an image, in place of the one that was not used for longest."""
        with self._lock:
            self._kept[key] = found
            self._kept.move_to_end(key)
            while len(self._kept) > self._capacity:
                self._kept.popitem(last=False)

    def clear(self) -> None:
        """Forgets every image."""
        with self._lock:
            self._kept.clear()


def image_key(pixels: torch.Tensor, *facts: object) -> bytes:
    """Returns a digest of an image's exact bytes, its dtype and shape, and of plain values besides."""
    digest = hashlib.sha256(repr((pixels.dtype, tuple(pixels.shape), facts)).encode())
    data = pixels.detach().cpu().contiguous().view(-1)
    digest.update(data.view(torch.uint8).numpy() if data.numel() else b"")
    return digest.digest()


def weights_stamp(*modules: torch.nn.Module) -> object | None:
    """Returns a value that changes with the weights of these modules; None where nobody could tell.

    Every change that autograd counts is seen, and so is one behind its back (`weight.data += ...`) that reaches one of a
    few numbers of the tensor, as every dense one does.
    """
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    if not tensors or any(tensor.is_inference() or tensor.is_meta for tensor in tensors):
        return None
    places = tuple((t.data_ptr(), t._version, str(t.dtype), str(t.device)) for t in tensors)
    with torch.no_grad():
        some = torch.cat([_probe(tensor).to(tensors[0].device) for tensor in tensors])
    return places, some.cpu().numpy().tobytes()


def _probe(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _PROBES)][:_PROBES].float()
