"""Policies that read as `full`, `routed` and `guarded` do, and log what every query read of which page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from oval_adapters.page_report.read_log import ReadLog
from oval_core.kv_pool import LayerStore
from oval_core.pages import SequencePages
from oval_core.policy import FullPolicy
from oval_core.repaging import Repaged
from oval_core.routing.guarded import GuardedPolicy
from oval_core.routing.mass_watch import MassWatch, stayed_of
from oval_core.routing.routed import RoutedPolicy
from oval_core.values import LayerSpec, PageSelection, RowPlan, StepPlan

__all__ = ["LoggedFull", "LoggedGuarded", "LoggedRouted"]


class _Logging:
    """Put before a policy: lets it select, and watches every layer on the way."""

    def _log_into(self, log: ReadLog) -> None:
        self._log = log
        # a group for each layer: so a layer's shares sum to 1, whatever the other layers read
        self._logged_layers = {layer: layer for own in log.groups for layer in own}
        self._logged = MassWatch(self._logged_layers)

    def select(self, sequences: Sequence[SequencePages], num_new: Sequence[int]) -> PageSelection:
        """See `SelectionPolicy`."""
        self._logged = MassWatch(self._logged_layers)
        selection: PageSelection = super().select(sequences, num_new)  # type: ignore[misc]
        return replace(selection, is_watched=True)

    def watches(self, layer_idx: int) -> bool:
        """Returns True: all that is read is logged."""
        return True

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
        """See `SelectionPolicy`."""
        self._logged.saw(layer_idx, row, query, store, plan, spec, bias, page_lse)
        if super().watches(layer_idx):  # type: ignore[misc]
            super().saw(layer_idx, row, query, store, plan, spec, bias, page_lse)  # type: ignore[misc]

    def commit(
        self,
        sequences: Sequence[SequencePages],
        plan: StepPlan,
        hidden_states: torch.Tensor | None,
        accepted: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """See `SelectionPolicy`."""
        for row in self._logged.rows:
            seq, num_new = sequences[row], plan.rows[row].num_new
            stayed = None if accepted is None else stayed_of(seq, num_new, accepted[row])
            seen = self._logged.row(row, stayed)
            count = seen.queries.shape[1]
            if count:
                self._log.note(row, seq.num_committed - count, seen)
        super().commit(sequences, plan, hidden_states, accepted)  # type: ignore[misc]
        self._logged = MassWatch(self._logged_layers)

    def repaged(self, row: int, parts: Sequence[Repaged], num_known: int) -> None:
        """See `SelectionPolicy`."""
        self._log.repage(row, parts)
        super().repaged(row, parts, num_known)  # type: ignore[misc]

    def abort(self) -> None:
        """See `SelectionPolicy`."""
        self._logged = MassWatch(self._logged_layers)
        super().abort()  # type: ignore[misc]

    def reorder(self, rows: Sequence[int]) -> None:
        """See `SelectionPolicy`."""
        self._log.reorder(rows)
        super().reorder(rows)  # type: ignore[misc]

    def reset(self) -> None:
        """See `SelectionPolicy`."""
        self._log.reset()
        super().reset()  # type: ignore[misc]


class LoggedFull(_Logging, FullPolicy):
    """Reads every page."""

    def __init__(self, log: ReadLog) -> None:
        self._log_into(log)

    def clone(self) -> LoggedFull:
        """See `SelectionPolicy`; the copy has a log of its own."""
        return LoggedFull(self._log.copy())


class LoggedRouted(_Logging, RoutedPolicy):
    """Reads what `routed` reads."""

    def __init__(self, log: ReadLog, *settings: Any) -> None:
        super().__init__(*settings)
        self._log_into(log)

    def clone(self) -> LoggedRouted:
        """See `SelectionPolicy`; the copy has a log of its own."""
        twin = super().clone()
        assert isinstance(twin, LoggedRouted), "a copy"
        twin._log_into(self._log.copy())
        return twin


class LoggedGuarded(LoggedRouted, GuardedPolicy):
    """Reads what `guarded` reads."""
