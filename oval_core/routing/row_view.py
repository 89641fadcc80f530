"""Shows a router what a cache knows of one sequence's pages. Shapes as in `view.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from oval_core.page_summary import PageSummaries
from oval_core.pages import Page
from oval_core.routing.page_embeddings import PageEmbeddings
from oval_core.routing.router import Router
from oval_core.routing.row_memory import RowMemory
from oval_core.routing.view import PageHistory, PageView


def view_row(
    router: Router,
    memory: RowMemory,
    summaries: PageSummaries,
    row: int,
    pages: Sequence[Page],
    signals: Mapping[str, torch.Tensor],
    history: PageHistory,
    lead: int,
) -> PageView:
    """Returns the view of some pages of a row, with the optional parts that the router needs.

    Args:
        router: who will look.
        memory: what is remembered of the row.
        summaries: of the cache.
        row: which one.
        pages: in the order of the sequence.
        signals: of these pages.
        history: of these pages.
        lead: forwards for which a selection will stand.
    """
    needs, graph, page_hidden, page_embedding = router.needs, None, None, None
    if "graph" in needs:
        assert memory.graph is not None, "nobody kept a graph"
        graph = memory.graph.adjacency([page.page_id for page in pages])
    if "page_hidden" in needs:
        embed = getattr(router, "embed_pages", None)
        if embed is None:
            page_hidden = summaries.hidden_means(row, pages).cpu()
        else:
            if memory.embeddings is None:
                memory.embeddings = PageEmbeddings(embed)
            page_embedding = memory.embeddings.of(
                pages,
                summaries.sequence(row).num_committed,
                lambda own: summaries.hidden_means(row, own).cpu(),
            )
    return PageView(
        starts=torch.tensor([page.tokens[0] for page in pages]),
        counts=torch.tensor([len(page) for page in pages]),
        length=1 + max(page.tokens[-1] for page in pages),
        history=history,
        hidden=summaries.last_hidden(row).float().cpu() if "hidden" in needs else None,
        page_hidden=page_hidden,
        page_embedding=page_embedding,
        signals=signals,
        graph=graph,
        lead=lead,
    )
