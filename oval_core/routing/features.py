"""What a learned router is told of each page, as numbers of like size. Shapes as in `view.py`; F features."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from oval_core.routing.locality import decay_features
from oval_core.routing.view import EPS, PageView

_LOW = -20.0
"""Logarithms are cut off here: a page that was never seen, or has no summary, is no worse than one with no mass."""


def history_features(view: PageView) -> torch.Tensor:
    """Returns [..., G, P, 7]: logs of last, fast, slow, mean and peak mass, how often chosen, log of the age."""
    history = view.history
    mean = history.total / history.steps.clamp(min=1)
    logs = [_log(x) for x in (history.last, history.fast, history.slow, mean, history.peak)]
    return torch.stack([*logs, history.chosen, history.age.log1p() / 4], -1)


def signal_features(view: PageView, names: Sequence[str]) -> torch.Tensor:
    """Returns [..., G, P, S]: each signal as a log share of all pages."""
    shares = [view.signals[name].float().log_softmax(-1).clamp(min=_LOW) for name in names]
    return torch.stack([_scaled(share) for share in shares], -1)


def place_features(view: PageView) -> torch.Tensor:
    """Returns [..., G, P, F]: decay and waves of the distance, the same for every group."""
    features = decay_features(view.distance)[..., None, :, :]
    shape = view.history.last.shape
    return features.expand(*shape, features.shape[-1])


def lead_feature(view: PageView) -> torch.Tensor:
    """Returns [..., G, P, 1]: log of the forwards for which the selection will stand, 0 to about 1."""
    return torch.full_like(view.history.last, math.log2(view.lead) / 5.0)[..., None]


def graph_feature(view: PageView) -> torch.Tensor:
    """Returns [..., G, P, 1]: log of the recent mass of the pages that a page is read together with."""
    graph = view.graph
    assert graph is not None, "no co-occurrence graph"
    mass = view.history.fast
    flat = mass.flatten(0, -2)  # [rows, P]
    adjacency = graph.to(mass.device, mass.dtype)
    if adjacency.layout == torch.strided:
        mixed = flat @ adjacency.T
    else:
        mixed = torch.sparse.mm(adjacency, flat.T).T
    return _log(mixed.view(mass.shape))[..., None]


def _log(mass: torch.Tensor) -> torch.Tensor:
    return _scaled((mass + EPS).log())


def _scaled(log: torch.Tensor) -> torch.Tensor:
    return (log + 6.0) / 3.0  # a page of 1/256 of the mass is near 0
