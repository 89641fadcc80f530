"""Slow oracles for page sizes: plain loops over Python numbers, or every partition there is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

LONGEST = 32


def reference_borders(values: Sequence[float], mean_size: int) -> list[int]:
    """First tokens of pages that hold equal mass, where a token of value v wishes for 1 + 31 / (1 + e^(v - shift))."""

    def density(shift: float) -> list[float]:
        return [1 / (1 + (LONGEST - 1) / (1 + math.exp(v - shift))) for v in values]

    low, high = min(values) - 30, max(values) + 30
    for _ in range(100):
        shift = (low + high) / 2
        if sum(density(shift)) > len(values) / mean_size:
            low = shift
        else:
            high = shift
    borders, mass, page = [0], 0.0, 0
    for token, share in enumerate(density(shift)):
        while mass + share / 2 >= page + 1:
            page += 1
            borders.append(token)
        mass += share
    return borders


def reference_sinkhorn(
    positions: Sequence[float], least: Sequence[float], blur: float, rounds: int
) -> list[list[float]]:
    """Shares of tokens in pages: scaled in turn so that rows sum to 1 and columns lie between `least` and 32."""
    shares = [
        [math.exp(-((x - m - 0.5) ** 2) / blur) for m in range(len(least))] for x in positions
    ]
    for turn in range(rounds + 1):
        shares = [[share / sum(row) for share in row] for row in shares]
        if turn < rounds:
            for m, bound in enumerate(least):
                held = sum(row[m] for row in shares)
                factor = min(max(held, bound), LONGEST) / held
                for row in shares:
                    row[m] *= factor
    return shares


def reference_loss(shares: Sequence[Sequence[float]], attention: Sequence[float]) -> float:
    """Variance of log attention within each page, around the page's own mean, weighted by mass."""
    total = sum(attention)
    loss = 0.0
    for page in range(len(shares[0])):
        weights = [row[page] * a / total for row, a in zip(shares, attention, strict=True)]
        logs = [math.log(a + 1e-7) for a in attention]
        if sum(weights) > 0:
            mean = sum(w * y for w, y in zip(weights, logs, strict=True)) / sum(weights)
            loss += sum(w * (y - mean) ** 2 for w, y in zip(weights, logs, strict=True))
    return loss


def all_partitions(count: int) -> Iterator[list[int]]:
    """Every way to write `count` as a sum of sizes, in order."""
    if count == 0:
        yield []
    for first in range(1, min(count, LONGEST) + 1):
        for rest in all_partitions(count - first):
            yield [first, *rest]


def partition_cost(
    sizes: Sequence[int], steps: Sequence[float], mean_size: int, price: float
) -> float:
    """Cost of a partition: unusual sizes, a price a page, and what a border costs where it lies."""
    cost, end = 0.0, 0
    for i, size in enumerate(sizes):
        end += size
        is_last = i == len(sizes) - 1
        cost += price + (0 if is_last and size < mean_size else (size / mean_size - 1) ** 2)
        cost += 0 if is_last else steps[end - 1]
    return cost
