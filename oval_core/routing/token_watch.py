"""Measures what share of attention each of the newest tokens gets while a forward runs, in some of the layers.

Of a long forward only the last queries are watched. Shapes: H query heads, W watched queries, L keys of a source, n keys of
the newest pages, D head dim.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from oval_core.kv_pool import LayerStore
from oval_core.routing.mass_watch import masked_scores, watched
from oval_core.values import LayerSpec, RowPlan, Segment


@dataclass(slots=True)
class _Layer:
    """One row in the running layer: log of the sum of exp(score) by source [H, W], scores of the newest keys [H, W, n]."""

    totals: list[torch.Tensor] = field(default_factory=list)
    newest: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Weights:
    """One row in one layer: attention [W, n] of the newest keys, mean over heads, and which of them a query saw."""

    mass: torch.Tensor
    seen: torch.Tensor


@dataclass(frozen=True, slots=True)
class TokenMass:
    """What the keys of a row's newest pages got in a forward, float32 [n] each, in key order.

    Attributes:
        mass: attention mass, summed over the queries that were watched, mean over layers and heads.
        queries: how many of these queries saw the key.
    """

    mass: torch.Tensor
    queries: torch.Tensor


class TokenWatch:
    """Watches the pages that hold the new tokens of each row, from the page that was open on."""

    def __init__(self, layers: Collection[int]) -> None:
        self._layers = frozenset(layers)
        self._layer: int | None = None
        self._open: dict[int, _Layer] = {}
        self._closed: dict[int, list[_Weights]] = {}

    def saw(
        self,
        layer: int,
        row: int,
        query: torch.Tensor,
        store: LayerStore,
        plan: RowPlan,
        spec: LayerSpec,
        bias: torch.Tensor | None,
        page_lse: torch.Tensor | None,
    ) -> None:
        """Adds what a row read of one source; as `SelectionPolicy.saw`."""
        if layer not in self._layers or not plan.length:
            return
        if layer != self._layer:
            self._close_layer()
            self._layer = layer
        query = watched(query, plan)
        own = self._open.setdefault(row, _Layer())
        num_newest = 0 if plan.is_past else _num_newest(plan)
        if page_lse is not None:  # one query, and no mask
            own.totals.append(page_lse.logsumexp(-1))
            if num_newest:
                own.newest = _plain_scores(query, store, plan, spec, num_newest)
            return
        scores = masked_scores(query, store, plan, spec, bias)
        own.totals.append(scores.logsumexp(-1))
        if num_newest:
            own.newest = scores[..., -num_newest:].clone()

    def take(
        self, row: int, num_new: int = 0, accepted: Sequence[int] | None = None
    ) -> TokenMass | None:
        """Returns what a row's newest pages got; None where no layer was watched. To be asked for after the last layer.

        Args:
            row: the row.
            num_new: tokens that the forward brought.
            accepted: places of those whose queries count; None for all.
        """
        self._close_layer()
        layers = self._closed.pop(row, [])
        if not layers:
            return None
        mass, seen = torch.stack([layer.mass for layer in layers]).mean(0), layers[0].seen
        if accepted is not None:
            unseen = num_new - len(mass)
            kept = [place - unseen for place in accepted if place >= unseen]
            mass, seen = mass[kept], seen[kept]
        return TokenMass(mass.sum(0), seen.sum(0).float())

    def clear(self) -> None:
        """Forgets the forward."""
        self._layer, self._open, self._closed = None, {}, {}

    def _close_layer(self) -> None:
        for row, own in self._open.items():
            assert own.newest is not None, "new tokens were never read"
            total = torch.stack([part.to(own.newest.device) for part in own.totals]).logsumexp(0)
            weights = (own.newest - total[..., None]).exp().nan_to_num(0.0)  # [H, W, n]
            seen = (own.newest > float("-inf")).any(0)
            self._closed.setdefault(row, []).append(_Weights(weights.mean(0).cpu(), seen.cpu()))
        self._open, self._layer = {}, None


def _num_newest(plan: RowPlan) -> int:
    """Returns the keys of the last pages, as many as hold the new tokens."""
    count = 0
    for _, size in reversed(plan.pages):
        if count >= plan.num_new:
            break
        count += size
    return count


def _plain_scores(
    query: torch.Tensor, store: LayerStore, plan: RowPlan, spec: LayerSpec, count: int
) -> torch.Tensor:
    """Returns scores [H, 1, n] of one query [H, 1, D] with the last keys."""
    keys = _last_keys(store.keys, plan.segments, count)
    grouped = (query[:, -1] * spec.scaling).reshape(keys.shape[0], -1, keys.shape[2])
    return torch.bmm(grouped, keys.transpose(1, 2)).view(query.shape[0], 1, -1).float()


def _last_keys(keys: torch.Tensor, segments: tuple[Segment, ...], count: int) -> torch.Tensor:
    """Returns the keys [K, count, D] at the end of the segments."""
    parts: list[torch.Tensor] = []
    for segment in reversed(segments):
        if isinstance(segment, slice):
            part = keys[:, max(segment.start, segment.stop - count) : segment.stop]
        else:
            part = keys.index_select(1, segment[-count:].to(keys.device))
        parts.append(part)
        count -= part.shape[1]
        if count == 0:
            break
    return torch.cat(parts[::-1], 1)
