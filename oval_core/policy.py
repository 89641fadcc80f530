"""Which pages a forward reads: the contract between a cache and its policy, and the policy that reads everything.

Knows nothing of models or devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from oval_core.kv_pool import LayerStore
from oval_core.page_summary import PageSummaries
from oval_core.pages import Page, SequencePages
from oval_core.repaging import Repaged
from oval_core.values import LayerSpec, PageSelection, RowPlan, StepPlan

if TYPE_CHECKING:
    from oval_core.routing.token_watch import TokenWatch


class SelectionPolicy(Protocol):
    """Chooses, for one cache, the pages that each forward reads, and may look at what they get.

    A forward is `select`, then for each layer `saw` and `missed`, then `commit` or `abort`.
    """

    name: str

    @property
    def tracks_hidden(self) -> bool:
        """Whether the cache must keep the last hidden state of every token, and hand new ones to `commit`."""
        ...

    def bind(self, summaries: PageSummaries, tokens: TokenWatch | None = None) -> None:
        """Is given the summaries of the cache's pages, before anything else, and who is to be told what `saw` is told."""
        ...

    def select(self, sequences: Sequence[SequencePages], num_new: Sequence[int]) -> PageSelection:
        """Returns what to read; `num_new[row]` tokens have just been appended, their pages are among it."""
        ...

    def watches(self, layer_idx: int) -> bool:
        """Whether `saw` and `missed` are to be called for this layer."""
        ...

    def saw(
        self,
        layer_idx: int,
        row: int,
        query: torch.Tensor,
        store: LayerStore,
        plan: RowPlan,
        spec: LayerSpec,
        bias: torch.Tensor | None,
        page_lse: torch.Tensor | None,
    ) -> None:
        """Is told that a row attended, with query [H, N, D], over the keys of `plan` in `store`, under a mask or none.

        page_lse: log of the sum of exp(score) of each page, [H, 1, P], if it was measured on the way.
        """
        ...

    def missed(self, layer_idx: int) -> Sequence[Sequence[Page]]:
        """Returns the pages that each row must read besides, now that the layer read its selection; empty for none."""
        ...

    def commit(
        self,
        sequences: Sequence[SequencePages],
        plan: StepPlan,
        hidden_states: torch.Tensor | None,
        accepted: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Takes what was seen; the new tokens count.

        Args:
            sequences: as they are now: tokens that do not count are gone.
            plan: of the forward.
            hidden_states: last ones [B, T, C], if tracked.
            accepted: by row, places of the new tokens that count; None for all.
        """
        ...

    def repaged(self, row: int, parts: Sequence[Repaged], num_known: int) -> None:
        """Is told, after `commit`, that pages of a row took the tokens of others over; it had `num_known` tokens before."""
        ...

    def foresee(self, sequences: Sequence[SequencePages]) -> PageSelection | None:
        """Returns what one more token a row would read as things are; None if that is everything or unknown."""
        ...

    def abort(self) -> None:
        """Forgets what was seen since `select`."""
        ...

    def reorder(self, rows: Sequence[int]) -> None:
        """Makes row i what row rows[i] was; a repeated row goes on by itself afterwards."""
        ...

    def reset(self) -> None:
        """Forgets every row."""
        ...

    def clone(self) -> SelectionPolicy:
        """Returns an independent copy, for a copy of the cache."""
        ...


class FullPolicy:
    """Reads every page: equal to dense attention."""

    name = "full"
    tracks_hidden = False

    def bind(self, summaries: PageSummaries, tokens: TokenWatch | None = None) -> None:
        """Does nothing: no summary is needed."""

    def select(
        self,
        sequences: Sequence[SequencePages],  # noqa: ARG002 - a `SelectionPolicy`
        num_new: Sequence[int],  # noqa: ARG002
    ) -> PageSelection:
        """Returns all pages of every row."""
        return PageSelection()

    def watches(self, layer_idx: int) -> bool:  # noqa: ARG002
        """Returns False: nothing depends on what pages get."""
        return False

    def saw(self, *_: object) -> None:
        """Is never called."""
        raise AssertionError("nobody watches")

    def missed(self, layer_idx: int) -> Sequence[Sequence[Page]]:  # noqa: ARG002
        """Returns nothing: all was read."""
        return ()

    def commit(
        self,
        sequences: Sequence[SequencePages],
        plan: StepPlan,
        hidden_states: torch.Tensor | None,
        accepted: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Does nothing."""

    def repaged(self, row: int, parts: Sequence[Repaged], num_known: int) -> None:
        """Does nothing: nothing is remembered of pages."""

    def foresee(self, sequences: Sequence[SequencePages]) -> PageSelection | None:  # noqa: ARG002
        """Returns None: everything."""
        return None

    def abort(self) -> None:
        """Does nothing."""

    def reorder(self, rows: Sequence[int]) -> None:
        """Does nothing."""

    def reset(self) -> None:
        """Does nothing."""

    def clone(self) -> FullPolicy:
        """Returns a policy for a copy of the cache."""
        return FullPolicy()
