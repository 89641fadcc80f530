"""Which pages each token of an answer read, as plain values. Knows no cache.

Shapes: T tokens of the answer, P pages, G groups of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oval_core.pages import PageKind
from oval_mm.spans import ImageSpan

__all__ = ["ReadPage", "ReadReport", "ReadToken"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadToken:
    """One token of an answer.

    Attributes:
        token_id: of the vocabulary.
        text: what it adds to the answer; empty where a letter is not complete yet.
        column: its place in the text. The query of the token before it read the pages, and chose this one.
    """

    token_id: int
    text: str
    column: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadPage:
    """One page of the cache.

    Attributes:
        page_id: in the cache.
        kind: `text` or `image`.
        columns: places of its tokens in the text.
        text: what they say; empty for pages of images.
        span: which of the report's spans it is of; None for text.
        places: of an image page: its patches, in the reading order of the span's grid.
    """

    page_id: int
    kind: PageKind
    columns: tuple[int, ...]
    text: str = ""
    span: int | None = None
    places: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReadReport:
    """What an answer read.

    Attributes:
        tokens: of the answer.
        pages: of the whole text, the answer among it, in the order of their first tokens.
        spans: images of the text; `start` is a column.
        mass: [T, P] share of attention that each page got, mean over layers and heads; rows sum to 1.
        by_group: [G, T, P] the same by group of layers.
        groups: the layers of each group.
    """

    tokens: tuple[ReadToken, ...]
    pages: tuple[ReadPage, ...]
    spans: tuple[ImageSpan, ...]
    mass: torch.Tensor
    by_group: torch.Tensor
    groups: tuple[tuple[int, ...], ...]

    @property
    def kinds(self) -> tuple[PageKind, ...]:
        """Kind of each page."""
        return tuple(page.kind for page in self.pages)

    @property
    def answer(self) -> str:
        """Text of the tokens."""
        return "".join(token.text for token in self.tokens)

    @property
    def image_share(self) -> torch.Tensor:
        """Share [T] of attention that pages of images got."""
        return self.mass[:, [kind == "image" for kind in self.kinds]].sum(1)

    def unread(self, span: int) -> tuple[int, ...]:
        """Returns the places of a span that no page holds: what a budget of image tokens left out."""
        held = {place for page in self.pages if page.span == span for place in page.places}
        return tuple(place for place in range(self.spans[span].grid.size) if place not in held)

    def top(self, token: int, most: int, kind: PageKind | None = None) -> list[tuple[int, float]]:
        """Returns (number, share) of the pages that a token read most, best first.

        Args:
            token: its number in the answer.
            most: pages at most.
            kind: only such pages; None for all.
        """
        shares = [(i, float(self.mass[token, i])) for i, page in enumerate(self.pages) if kind in (None, page.kind)]  # fmt: skip
        return sorted(shares, key=lambda own: -own[1])[:most]

    def to_dict(self, digits: int = 4) -> dict[str, Any]:
        """Returns plain values, ready for JSON; shares are rounded."""
        return {
            "tokens": [{"id": t.token_id, "text": t.text, "column": t.column} for t in self.tokens],
            "pages": [_page_row(page) for page in self.pages],
            "images": [
                {"image": s.image, "column": s.start, "rows": s.grid.rows, "cols": s.grid.cols, "unread": list(self.unread(i))}
                for i, s in enumerate(self.spans)
            ],
            "mass": _rounded(self.mass, digits),
            "image_share": [round(share, digits) for share in self.image_share.tolist()],
            "layer_groups": [list(own) for own in self.groups],
        }  # fmt: skip


def _page_row(page: ReadPage) -> dict[str, Any]:
    row: dict[str, Any] = {"id": page.page_id, "kind": page.kind, "columns": list(page.columns)}
    if page.kind == "text":
        return {**row, "text": page.text}
    return {**row, "span": page.span, "places": list(page.places)}


def _rounded(rows: torch.Tensor, digits: int) -> list[Sequence[float]]:
    return [[round(value, digits) for value in row] for row in rows.tolist()]
