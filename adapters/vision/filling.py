"""What a forward brings that reads image tokens which an earlier prompt left out. Plain facts; runs nothing.

Shapes: B rows, W columns that the decoder gets, n tokens of a view, C the decoder's hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from oval_adapters.vision.placement import ImagePart, Parts
from oval_adapters.vision.unread import PlacedView
from oval_core.values import RowRequest

if TYPE_CHECKING:
    from oval_adapters.vision.row_images import ImageLog

__all__ = ["Filling", "make_filling"]

Wanted = Mapping[PlacedView, Sequence[int]]
"""By view, the places to read, ascending."""


@dataclass(frozen=True, slots=True, eq=False)
class Filling:
    """Unread image tokens to read.

    Attributes:
        columns: by row, long [n] columns of the cache that they lie in, ascending.
        inputs: embeddings [B, W, C], rows padded on the left.
        positions: long [B, W].
        images: by row, the views they belong to, laid out one after the other.
        places: by row, long [n] which columns of that layout they are.
    """

    columns: tuple[torch.Tensor, ...]
    inputs: torch.Tensor
    positions: torch.Tensor
    images: tuple[Parts, ...]
    places: tuple[torch.Tensor, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens over all rows."""
        return sum(len(own) for own in self.columns)

    def told(
        self, requests: Sequence[RowRequest], log: ImageLog, lengths: Sequence[int], tile: int
    ) -> list[RowRequest]:
        """Returns what rows bring, with the pages that their tokens make.

        Args:
            requests: by `ColumnMap.fill`.
            log: of the cache's images.
            lengths: tokens of each row before.
            tile: see `VisionConfig`.
        """
        both = zip(requests, self.places, strict=True)
        laid_out = [replace(own, query_places=places) for own, places in both]
        paged = log.begin(laid_out, self.images, lengths, tile)
        return [replace(own, images=new.images) for own, new in zip(requests, paged, strict=True)]


def make_filling(wanted: Sequence[Wanted], like: torch.Tensor) -> Filling | None:
    """Returns the forward for what each row wants; None where that is nothing.

    Args:
        wanted: by row.
        like: a tensor [.., C] of the dtype and on the device of the decoder's embeddings.
    """
    counts = [sum(map(len, own.values())) for own in wanted]
    width = max(counts, default=0)
    if not width:
        return None
    inputs = like.new_zeros(len(wanted), width, like.shape[-1])
    positions = torch.zeros(len(wanted), width, dtype=torch.long, device=like.device)
    columns, images, places = [], [], []
    for row, own in enumerate(wanted):
        ordered = sorted(own.items(), key=lambda item: item[0].column)
        at, parts, seen, start = width - counts[row], [], [], 0
        held: list[int] = []
        for view, picked in ordered:
            index = torch.tensor(list(picked), dtype=torch.long)
            end = at + len(index)
            inputs[row, at:end] = view.view.features[index.to(view.view.features.device)].to(like)
            positions[row, at:end] = view.positions[index.to(view.positions.device)].to(positions)
            parts.append(ImagePart(start, view.length, 0, view.view))
            seen += [start + place for place in picked]
            held += [view.column + place for place in picked]
            at, start = end, start + view.length
        columns.append(torch.tensor(held, dtype=torch.long))
        places.append(torch.tensor(seen, dtype=torch.long))
        images.append(tuple(parts))
    return Filling(tuple(columns), inputs, positions, tuple(images), tuple(places))
