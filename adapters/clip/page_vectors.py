"""Embeddings of the pages of a prompt in CLIP's space: regions of its images, text of its text pages.

Shapes: P pages, D of the joint space, N image tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from oval_adapters.clip.shared_tower import why_not_shared
from oval_mm.clip.embedder import ClipEmbedder, PixelFacts

if TYPE_CHECKING:
    from oval_mm.spans import Grid

__all__ = ["ImagePageVectors", "TextPageVectors", "pixels_for"]

_TEXTS_KEPT = 1024


class ImagePageVectors:
    """Embeds image pages, from LLaVA's own hidden states where its tower is the CLIP's, else by a pass of the CLIP.

    Attributes:
        shared: whether no second image pass is needed.
        why_not: reason where it is.

    Args:
        llava: the model whose images are to be embedded.
        embedder: the CLIP.
        pixels: how LLaVA's processor normalises its pixels; None for CLIP's own mean and deviation.
    """

    def __init__(
        self, llava: Any, embedder: ClipEmbedder, pixels: PixelFacts | None = None
    ) -> None:
        self.why_not = why_not_shared(llava, embedder)
        self.shared = self.why_not is None
        self._embedder = embedder
        self._from = pixels

    def of_image(
        self,
        grid: Grid,
        pages: Sequence[Sequence[int]],
        hidden: torch.Tensor | None,
        pixel_values: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns the embeddings [P, D] of one image's pages.

        Args:
            grid: of its tokens.
            pages: places of each page.
            hidden: [N, H] hidden states of LLaVA's tower that the projector read, where they are held.
            pixel_values: [3, rows, columns] as LLaVA's tower got them.
        """
        embedder = self._embedder
        if self.shared and hidden is not None:
            return embedder.embed_regions(hidden[None], grid, pages)[0]
        assert pixel_values is not None, "neither hidden states nor pixels of an image"
        source = self._from
        if source is None:
            size = (int(pixel_values.shape[-2]), int(pixel_values.shape[-1]))
            source = PixelFacts(size=size, mean=embedder.pixels.mean, std=embedder.pixels.std)
        pixels = pixels_for(pixel_values[None], source, embedder.pixels)
        own = embedder.hidden_of(pixels)
        return embedder.embed_regions(own, grid, pages, embedder.patch_grid)[0]


class TextPageVectors:
    """Embeds what a page of text says. A page's words are remembered: most pages never change.

    Args:
        embedder: the CLIP.
        tokenizer: of the decoder: makes words of a page's ids. A CLIP reads 77 tokens at most; a page of 32 fits.
    """

    def __init__(self, embedder: ClipEmbedder, tokenizer: Any) -> None:
        self._embedder, self._tokenizer = embedder, tokenizer
        self._held: OrderedDict[str, torch.Tensor] = OrderedDict()

    def of_pages(self, ids: Sequence[int], pages: Sequence[Sequence[int]]) -> torch.Tensor:
        """Returns the embeddings [P, D] of pages, places among `ids`."""
        return self.of_texts([self.text([ids[place] for place in places]) for places in pages])

    def text(self, ids: Sequence[int]) -> str:
        """Returns what ids say, without special tokens."""
        said: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return said.strip()

    def of_texts(self, texts: Sequence[str]) -> torch.Tensor:
        """Returns the embeddings [n, D] of texts."""
        lacking = [text for text in dict.fromkeys(texts) if text not in self._held]
        if lacking:
            made = self._embedder.embed_text(lacking)
            self._held.update(zip(lacking, made, strict=True))
        found = torch.stack([self._held[text] for text in texts])
        for text in texts:
            self._held.move_to_end(text)
        while len(self._held) > _TEXTS_KEPT:
            self._held.popitem(last=False)
        return found


def pixels_for(pixels: torch.Tensor, source: PixelFacts, target: PixelFacts) -> torch.Tensor:
    """Returns images [B, 3, rows, columns] normalised and sized for one tower as another one wants them."""
    values = pixels.float()

    def column(numbers: tuple[float, float, float]) -> torch.Tensor:
        return values.new_tensor(numbers)[:, None, None]

    if source.size != target.size:
        plain = (values * column(source.std) + column(source.mean)).clamp(0, 1)
        plain = F.interpolate(plain, target.size, mode="bicubic", antialias=True).clamp(0, 1)
    elif (source.mean, source.std) == (target.mean, target.std):
        return values
    else:
        plain = values * column(source.std) + column(source.mean)
    return (plain - column(target.mean)) / column(target.std)
