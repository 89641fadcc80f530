"""The article's `PageManager`: learned page embeddings, their places and their co-occurrence, by page index.

It owns no K/V and cuts no pages: `PageTable` does. Shapes: B rows of a batch, E page embedding size.
"""

from __future__ import annotations

import torch
from torch import nn

from oval_core.config import check_int
from oval_core.errors import ConfigError
from oval_core.routing.cooccurrence import (
    DEFAULT_REBUILD_EVERY,
    DEFAULT_WINDOW_PAIRS,
    CooccurrenceGraph,
)
from oval_core.routing.graph_conv import GraphConv
from oval_core.routing.locality import decay_waves


class PageManager(nn.Module):
    """Local embeddings of the pages 0, 1, ... of a sequence.

    Learned are the embeddings and the graph layer. The graph itself is what was seen of one text: it is no part of
    `state_dict()`, and `reset()` starts the next text.
    """

    def __init__(
        self,
        max_pages: int,
        page_embedding_dim: int,
        window_pairs: int = DEFAULT_WINDOW_PAIRS,
        rebuild_every: int = DEFAULT_REBUILD_EVERY,
    ) -> None:
        """Makes a manager that has seen no page.

        Args:
            max_pages: pages that have an embedding: 0..max_pages - 1.
            page_embedding_dim: E, even: waves come as cosine and sine.
            window_pairs: see `CooccurrenceGraph`.
            rebuild_every: see `CooccurrenceGraph`.
        """
        super().__init__()
        check_int("max_pages", max_pages, 1, None)
        check_int("page_embedding_dim", page_embedding_dim, 2, None)
        if page_embedding_dim % 2:
            raise ConfigError(
                f"page_embedding_dim: got {page_embedding_dim}. Allowed: an even number. Add or take one."
            )
        self.max_pages = max_pages
        self.page_embeddings = nn.Embedding(max_pages, page_embedding_dim)
        self.graph = CooccurrenceGraph(window_pairs, rebuild_every)
        # starts as the article's plain sum over neighbours, which has no weights
        self.graph_conv = GraphConv(page_embedding_dim, page_embedding_dim, nn.Identity())
        nn.init.eye_(self.graph_conv.weight)
        self.num_pages = 0
        """Pages of the sequence as far as known: told to `update`, or seen in `update_cooc_graph`."""

    def reset(self) -> None:
        """Forgets the sequence; what was learned stays."""
        self.graph.reset()
        self.num_pages = 0

    def update(self, num_pages: int) -> None:
        """Follows the cache, after each change of it: pages from `num_pages` on have ended and leave the graph.

        A page that only grew needs no call.
        """
        check_int("num_pages", num_pages, 0, self.max_pages)
        self.graph.forget(range(num_pages, self.num_pages))
        self.num_pages = num_pages

    def update_cooc_graph(self, page_ids: torch.Tensor) -> bool:
        """Takes in the pages that one step selected. Returns whether the graph was rebuilt by it.

        Args:
            page_ids: long [B, top_k] or [top_k], best first. Pages of different rows make no pair: no query reads
                both.
        """
        ids = self._checked(page_ids)
        if ids.ndim not in (1, 2):
            raise ConfigError(
                f"page_ids: got shape {list(ids.shape)}. Allowed: [batch, top_k] or [top_k]. Give one row a sequence."
            )
        self.num_pages = max(self.num_pages, _end(ids))
        return self.graph.observe(*(ids if ids.ndim == 2 else ids[None]).tolist())

    def get_local_embedding(self, page_ids: torch.Tensor) -> torch.Tensor:
        """Returns [..., 2 E]: decayed waves of the distance to the newest page, then the graph's part: the
        page's embedding and those of the pages selected with it, weighted by how often.

        Args:
            page_ids: long [...].
        """
        ids = self._checked(page_ids)
        size = max(self.num_pages, _end(ids))
        weight = self.page_embeddings.weight
        ids = ids.to(weight.device)
        waves = decay_waves(size - 1 - ids, weight.shape[1] // 2)
        neighbours = self.graph_conv(weight[:size], self.graph.adjacency(range(size)))
        return torch.cat((waves.to(weight.dtype), neighbours[ids]), -1)

    def get_page_offsets(
        self, page_ids: torch.Tensor, page_sizes: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the first token and the size of each page, both long [...].

        Args:
            page_ids: long [...], pages of one sequence.
            page_sizes: long [P] tokens of every page of it, in order.
        """
        ids, sizes = self._checked(page_ids), _whole_numbers("page_sizes", page_sizes).long()
        if sizes.ndim != 1 or (sizes < 0).any() or _end(ids) > len(sizes):
            raise ConfigError(
                f"page_sizes: got shape {list(sizes.shape)} for pages up to {_end(ids) - 1}. "
                "Allowed: [P], one size of 0 or more for every page. Give the sizes of all pages in order."
            )
        ids = ids.to(sizes.device)
        return (sizes.cumsum(0) - sizes)[ids], sizes[ids]

    def _checked(self, page_ids: torch.Tensor) -> torch.Tensor:
        ids = _whole_numbers("page_ids", page_ids)
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= self.max_pages):
            raise ConfigError(
                f"page_ids: got {int(ids.min())}..{int(ids.max())}. Allowed: 0..{self.max_pages - 1}. "
                "Make max_pages larger."
            )
        return ids.long()


def _whole_numbers(name: str, value: torch.Tensor) -> torch.Tensor:
    is_tensor = isinstance(value, torch.Tensor)
    if not is_tensor or value.is_floating_point() or value.dtype == torch.bool:
        shown = value.dtype if is_tensor else type(value).__name__
        raise ConfigError(
            f"{name}: got {shown}. Allowed: a tensor of whole numbers. Give one of dtype long."
        )
    return value


def _end(ids: torch.Tensor) -> int:
    return int(ids.max()) + 1 if ids.numel() else 0
