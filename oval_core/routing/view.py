"""What a router may know of the pages of a sequence before a forward: their history, places and contents.

Shapes: G layer groups, P pages, C hidden size. Every tensor may have leading dimensions (steps, passages); they broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

import torch

EPS = 1e-7
"""Added to a mass before its logarithm."""

_FAST, _SLOW, _CHOSEN = 0.7, 0.97, 0.9


@dataclass(frozen=True, slots=True)
class PageHistory:
    """What was seen of each page when it was read, float32 [..., G, P]. A page that is not read keeps what it had.

    Attributes:
        last: attention mass at the last step that read the page, mean over the layers and heads of the group.
        fast: moving average of the mass, factor 0.7 a step.
        slow: moving average of the mass, factor 0.97 a step.
        total: sum of the mass over all steps that read the page.
        steps: steps that read the page.
        peak: moving average (0.7) of the largest mass in any head and layer of the group: few heads retrieve.
        chosen: moving average (0.9) of whether the page was read (PRR, arXiv 2606.30389).
        age: steps since the page was read.
    """

    last: torch.Tensor
    fast: torch.Tensor
    slow: torch.Tensor
    total: torch.Tensor
    steps: torch.Tensor
    peak: torch.Tensor
    chosen: torch.Tensor
    age: torch.Tensor

    @classmethod
    def empty(cls, *shape: int, device: torch.device | str = "cpu") -> PageHistory:
        """Returns a history [*shape] of pages that were never read."""
        zeros = {f.name: torch.zeros(shape, device=device) for f in fields(cls)}
        return cls(**zeros)

    def observe(self, mass: torch.Tensor, peak: torch.Tensor, read: torch.Tensor) -> PageHistory:
        """Returns the history after one more step.

        Args:
            mass: [..., G, P] attention mass, mean over the layers and heads of a group; read where `read`.
            peak: [..., G, P] the largest of them.
            read: bool [..., G, P] which pages the step read.
        """
        first = self.steps == 0

        def averaged(old: torch.Tensor, new: torch.Tensor, factor: float) -> torch.Tensor:
            mixed = torch.where(first, new, factor * old + (1 - factor) * new)
            return torch.where(read, mixed, old)

        seen = read.to(mass.dtype)
        return PageHistory(
            last=torch.where(read, mass, self.last),
            fast=averaged(self.fast, mass, _FAST),
            slow=averaged(self.slow, mass, _SLOW),
            total=self.total + mass * seen,
            steps=self.steps + seen,
            peak=averaged(self.peak, peak, _FAST),
            chosen=_CHOSEN * self.chosen + (1 - _CHOSEN) * seen,
            age=torch.where(read, torch.zeros_like(self.age), self.age + 1),
        )

    def filled(self, estimate: torch.Tensor) -> PageHistory:
        """Returns the history in which the last step left no gap: pages that it did not read got what was estimated.

        So what key summaries say about the rest goes on being remembered, and a page can come back.

        Args:
            estimate: [..., G, P] attention mass by summaries and the query of the last step.
        """
        gap = (self.age > 0) | (self.steps == 0)

        def averaged(old: torch.Tensor, factor: float) -> torch.Tensor:
            return torch.where(gap, factor * old + (1 - factor) * estimate, old)

        return replace(
            self,
            last=torch.where(gap, estimate, self.last),
            fast=averaged(self.fast, _FAST),
            slow=averaged(self.slow, _SLOW),
        )

    def select(self, pages: torch.Tensor) -> PageHistory:
        """Returns the history of these pages (indices [P']); -1 is a page that was never read."""
        known = pages >= 0
        index = pages.clamp(min=0)

        def pick(old: torch.Tensor) -> torch.Tensor:
            if old.shape[-1] == 0:
                return old.new_zeros(*old.shape[:-1], len(pages))
            return old.index_select(-1, index) * known

        return PageHistory(**{f.name: pick(getattr(self, f.name)) for f in fields(self)})

    def of_group(self, group: int, num_pages: int) -> PageHistory:
        """Returns the history [1, num_pages] of one group; pages beyond those that have one were never read."""
        known = self.last.shape[-1]
        pages = torch.arange(num_pages)
        padded = self.select(torch.where(pages < known, pages, -1))
        return padded.map(lambda old: old[..., group : group + 1, :])

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PageHistory:
        """Returns a history with `change` applied to every tensor."""
        return PageHistory(**{f.name: change(getattr(self, f.name)) for f in fields(self)})


@dataclass(frozen=True, slots=True)
class PageView:
    """The pages of one sequence as a router sees them, in the order of the sequence.

    Attributes:
        starts: long [P] first token of each page.
        counts: long [P] tokens of each page.
        length: tokens of the sequence, or long [...] by step: the newest token is `length - 1`.
        history: what was seen when pages were read.
        hidden: [..., C] last hidden state of the newest committed token; None unless the router needs it.
        page_hidden: [P, C] mean last hidden state of each page; None unless needed.
        page_embedding: [P, E] what the router's own `embed_pages` made of `page_hidden`, in place of it; None where
            nobody keeps that.
        signals: by name, [..., G, P] log of the attention mass that key summaries and a query suggest, up to a
            constant a group. The query is the previous step's for a router that looks ahead.
        graph: [P, P] normalised co-occurrence, sparse or dense; None unless needed.
        lead: forwards for which a selection will stand.
    """

    starts: torch.Tensor
    counts: torch.Tensor
    length: int | torch.Tensor
    history: PageHistory
    hidden: torch.Tensor | None = None
    page_hidden: torch.Tensor | None = None
    page_embedding: torch.Tensor | None = None
    signals: Mapping[str, torch.Tensor] = field(default_factory=dict)
    graph: torch.Tensor | None = None
    lead: int = 1

    @property
    def distance(self) -> torch.Tensor:
        """Tokens from the newest token back to the last one of each page, [..., P], at least 0, float32."""
        length = torch.as_tensor(self.length, device=self.starts.device)
        return (length[..., None] - (self.starts + self.counts)).clamp(min=0).float()
