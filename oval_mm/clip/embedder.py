"""What every CLIP offers here: embeddings of texts, of images, and of regions of an image. Knows no library.

Shapes: B images, N patches (without the class token), H width of the vision tower, P pages, D of the joint space.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from oval_mm.spans import Grid

__all__ = ["ClipEmbedder", "PixelFacts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PixelFacts:
    """The pixels that a tower wants.

    Attributes:
        size: rows and columns in pixels.
        mean: of each colour, subtracted from values in 0..1.
        std: of each colour, divided by.
    """

    size: tuple[int, int]
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)


class ClipEmbedder(Protocol):
    """Puts texts, images and regions into one space, every vector of length 1."""

    @property
    def dim(self) -> int:
        """D."""
        ...

    @property
    def pixels(self) -> PixelFacts:
        """What `embed_images` and `hidden_of` want."""
        ...

    @property
    def patch_grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        ...

    def embed_text(self, texts: Sequence[str]) -> torch.Tensor:
        """Returns embeddings [n, D]; what a text has beyond the tower's places (77 tokens) is left out."""
        ...

    def embed_images(self, pixels: torch.Tensor) -> torch.Tensor:
        """Returns embeddings [B, D] of images [B, 3, rows, columns], normalised as `pixels` says."""
        ...

    def hidden_of(self, pixels: torch.Tensor) -> torch.Tensor:
        """Returns what enters the last layer of the vision tower, [B, N, H], without the class token."""
        ...

    def embed_regions(
        self,
        hidden: torch.Tensor,
        grid: Grid,
        pages: Sequence[Sequence[int]],
        patches: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """Returns embeddings [B, P, D] of the pages of a grid of image tokens.

        Args:
            hidden: [B, N, H] from `hidden_of`, or of an equal tower; a class token in front of them is left out.
            grid: of the image tokens that the pages partition.
            pages: places of each page in the grid, row by row, newline places included.
            patches: rows and columns of `hidden` over the same image, where they are not the grid's.
        """
        ...
