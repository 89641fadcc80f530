"""What a router is: it scores the pages of a sequence for the next forward. Chooses nothing, reads no K/V.

Shapes as in `view.py`.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from oval_core.routing.view import PageView

PARTS = frozenset({"filled_history", "graph", "hidden", "page_hidden"})
"""What a router may need beside signals."""

FILLS_BY = "sketch"
"""The signal that fills histories."""

Lead = Literal["step", "layer"]
"""When scores are known: `step`: before the forward, so that pages can be fetched meanwhile; `layer`: only with the true
query of a layer, as attention begins."""


class Router(Protocol):
    """Scores pages for the next forward, for each group of layers."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def lead(self) -> Lead:
        """When its scores are known."""
        ...

    @property
    def needs(self) -> frozenset[str]:
        """Which optional parts of `PageView` it reads: `hidden`, `page_hidden`, `graph`, or names of `signals`.

        `filled_history` besides: pages that the last step did not read have estimates by the signal `sketch` in their
        history.
        """
        ...

    def score(self, view: PageView) -> torch.Tensor:
        """Returns scores [..., G, P]: log of the predicted attention mass of a page, up to a constant a group."""
        ...
