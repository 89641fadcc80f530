"""What CLIP says of a prompt's question and of its image pages; each image is embedded once.

Shapes: P pages of a view, D of CLIP's joint space.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from oval_mm.spans import Grid
from oval_mm.tiles import tile_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oval_adapters.clip.page_vectors import ImagePageVectors, TextPageVectors
    from oval_adapters.vision.placement import ImageView

__all__ = ["PromptVectors"]

_VIEWS_KEPT = 32
_Key = tuple[int, Grid, int]


class PromptVectors:
    """Vectors of questions and pages.

    Args:
        images: embeds image pages.
        texts: embeds words.
    """

    def __init__(self, images: ImagePageVectors, texts: TextPageVectors) -> None:
        self._images, self._texts = images, texts
        self._held: OrderedDict[_Key, tuple[ImageView, torch.Tensor]] = OrderedDict()

    @property
    def shared(self) -> bool:
        """Whether LLaVA's own hidden states serve: no second image pass."""
        return self._images.shared

    def question(self, ids: Sequence[int]) -> torch.Tensor:
        """Returns the embedding [D] of what ids say."""
        return self._texts.of_texts([self._texts.text(ids)])[0]

    def pages(self, view: ImageView, tile: int) -> torch.Tensor:
        """Returns the embeddings [P, D] of a view's pages."""
        # of the memory of the features, which is held below
        key = (view.features.data_ptr(), view.grid, tile)
        if key not in self._held:
            self._held[key] = view, self._embed(view, tile)
            while len(self._held) > _VIEWS_KEPT:
                self._held.popitem(last=False)
        self._held.move_to_end(key)
        return self._held[key][1]

    def _embed(self, view: ImageView, tile: int) -> torch.Tensor:
        image = view.source
        pages = tile_pages(view.grid, tile)
        largest = max(image.views, key=lambda grid: grid.size)
        pixels = image.pixels
        if pixels is not None and pixels.ndim == 4:
            pixels = pixels[0]  # the whole picture; parts of it follow
        if view.grid.rows == 1 and view.grid.size < largest.size:
            # a class token shows no region: it stands for the whole picture
            hidden = None if image.hidden is None else image.hidden[view.grid.size :]
            whole = self._images.of_image(largest, tile_pages(largest, tile), hidden, pixels)
            return F.normalize(whole.mean(0, keepdim=True), dim=-1).expand(len(pages), -1)
        return self._images.of_image(view.grid, pages, view.hidden, pixels)
