"""Means over passages, and how sure they are: bootstrap intervals. Values come by kind; kinds count equally."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from oval_adapters.bench.recall_values import Interval

RESAMPLES = 2000


def mean_of_kinds(values: Sequence[Sequence[float]]) -> float:
    """Returns the mean over kinds of the means over their passages, nan left out; nan where there is nothing."""
    means = [_mean([v for v in own if not math.isnan(v)]) for own in values]
    return _mean([m for m in means if not math.isnan(m)])


def interval(values: Sequence[Sequence[float]], seed: int) -> Interval | None:
    """Returns the 95 % interval of `mean_of_kinds`, by drawing the passages of each kind anew.

    None where a kind has one passage only: that does not tell how passages differ.
    """
    if min(map(len, values)) < 2:
        return None
    generator = torch.Generator().manual_seed(seed)
    means = torch.zeros(RESAMPLES, dtype=torch.float64)
    for own in values:
        sample = torch.tensor(own, dtype=torch.float64)
        drawn = torch.randint(len(own), (RESAMPLES, len(own)), generator=generator)
        means += sample[drawn].mean(1) / len(values)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
