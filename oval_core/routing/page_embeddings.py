"""What a router makes of the pages of one sequence, kept while the pages do not change. Shapes: P pages, C hidden size, E."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from oval_core.pages import Page


class PageEmbeddings:
    """Embeddings [P, E] of pages, in the order of the sequence; only those that are new or grew are made."""

    def __init__(self, embed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._embed = embed
        self._stamps: list[tuple[int, int, int]] = []  # page id, version, committed tokens
        self._held = torch.empty(0, 0)

    def of(
        self,
        pages: Sequence[Page],
        num_committed: int,
        hidden_of: Callable[[Sequence[Page]], torch.Tensor],
    ) -> torch.Tensor:
        """Returns the embeddings of pages.

        Args:
            pages: of committed tokens.
            num_committed: committed tokens of the sequence.
            hidden_of: gives mean hidden states [n, C] of some of them.
        """
        stamps = [(p.page_id, p.version, min(num_committed - p.tokens[0], len(p))) for p in pages]
        same = 0
        for old, new in zip(self._stamps, stamps, strict=False):
            if old != new:
                break
            same += 1
        if same < len(stamps):
            with torch.no_grad():
                made = self._embed(hidden_of(pages[same:]))
            self._held = torch.cat([self._held[:same], made]) if same else made
        elif same < len(self._stamps):
            self._held = self._held[:same]
        self._stamps = stamps
        return self._held
