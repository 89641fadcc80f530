"""What a frozen vision tower sees in pictures, computed once each and kept on the disk. N patches, D vision size."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from oval_core.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedModel

__all__ = ["FeatureStore"]

_BATCH = 16


class FeatureStore:
    """Hidden states of the tower's last layer without the first token, bfloat16 [N, D] a picture.

    A picture's file is named by its pixels and the tower's weights: another run, or another training, finds it again.

    Attributes:
        tokens: N.
        size: D.
        computed: pictures that went through the tower.
    """

    def __init__(self, folder: Path, tower: PreTrainedModel, image_processor: Any) -> None:
        """Takes a tower in evaluation mode.

        Raises:
            ConfigError: the folder cannot be made.
        """
        size = image_processor.size
        self._folder, self._tower, self._processor = folder, tower, image_processor
        patch = tower.config.patch_size
        self.tokens = (size["height"] // patch) * (size["width"] // patch)
        self.size: int = tower.config.hidden_size
        self.computed = 0
        self._dtype = tower.dtype
        self._known = _weights_digest(tower)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"out: cannot make the folder {folder}: {error.strerror}. Allowed: a folder. Name another one."
            ) from error

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        size, patch = self._processor.size, self._tower.config.patch_size
        return size["height"] // patch, size["width"] // patch

    def of(self, pictures: Sequence[Image]) -> torch.Tensor:
        """Returns what the tower sees in pictures, [pictures, N, D].

        Args:
            pictures: of any size; the processor scales them.
        """
        found = torch.empty(len(pictures), self.tokens, self.size, dtype=torch.bfloat16)
        for start in range(0, len(pictures), _BATCH):
            part = list(pictures[start : start + _BATCH])
            pixels = self._processor(images=part, return_tensors="pt").pixel_values
            paths = [self._path(one) for one in pixels]
            missing = [place for place, path in enumerate(paths) if not self._read(path, found[start + place])]  # fmt: skip
            if missing:
                seen = self._look(pixels[missing])
                for row, place in enumerate(missing):
                    found[start + place] = seen[row]
                    self._write(paths[place], seen[row])
        return found

    @torch.no_grad()
    def _look(self, pixels: torch.Tensor) -> torch.Tensor:
        self.computed += len(pixels)
        output = self._tower(pixels.to(self._dtype), output_hidden_states=True)
        hidden: torch.Tensor = output.hidden_states[-1]
        return hidden[:, 1:].to(torch.bfloat16)

    def _path(self, pixels: torch.Tensor) -> Path:
        digest = hashlib.sha256(self._known)
        digest.update(pixels.contiguous().numpy().tobytes())
        name = digest.hexdigest()
        return self._folder / name[:2] / f"{name}.bf16"

    def _read(self, path: Path, out: torch.Tensor) -> bool:
        """Fills `out` from a file; returns whether there was a whole one."""
        try:
            data = bytearray(path.read_bytes())
        except OSError:
            return False
        if len(data) != out.numel() * out.element_size():
            return False
        out.copy_(torch.frombuffer(data, dtype=out.dtype).view(out.shape))
        return True

    def _write(self, path: Path, seen: torch.Tensor) -> None:
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_bytes(seen.contiguous().view(torch.int16).numpy().tobytes())
        partial.replace(path)  # a file that is there is whole


def _weights_digest(tower: PreTrainedModel) -> bytes:
    digest = hashlib.sha256(str(tower.dtype).encode())
    for name, tensor in sorted(tower.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()
