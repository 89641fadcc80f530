"""Splits questions so that no picture is on both sides. Knows names of pictures, nothing of what is learnt."""

from __future__ import annotations

import random
from collections.abc import Sequence

from oval_core.errors import ConfigError

__all__ = ["split_by_picture"]


def split_by_picture(
    pictures: Sequence[Sequence[str]], share: float, seed: int
) -> tuple[list[int], list[int]]:
    """Returns which questions to train on, and which to judge by, in a seeded order.

    Questions that have a picture in common, directly or over others, stay together.

    Args:
        pictures: names of each question's pictures; one without names stands for itself.
        share: of the questions, to judge by: at most so many, one group at least.
        seed: of the order.
    Raises:
        ConfigError: all questions hang together.
    """
    groups = _groups(pictures)
    random.Random(seed).shuffle(groups)
    if len(groups) < 2:
        raise ConfigError(
            f"records: got {len(pictures)} that all share pictures. Allowed: pictures for both sides, training and judging. "
            "Record questions about other pictures too."
        )
    wanted = max(1, round(share * len(pictures)))
    held: list[int] = []
    train: list[list[int]] = []
    for group in groups:
        if len(held) + len(group) <= wanted:
            held += group
        else:
            train.append(group)
    if not held:  # each group is larger than the share
        smallest = min(range(len(train)), key=lambda place: len(train[place]))
        held = train.pop(smallest)
    elif not train:
        train = [groups[-1]]
        held = held[: -len(groups[-1])]
    return [one for group in train for one in group], held


def _groups(pictures: Sequence[Sequence[str]]) -> list[list[int]]:
    """Returns the questions that hang together, each group and all of them in order."""
    parent = list(range(len(pictures)))

    def root(one: int) -> int:
        while parent[one] != one:
            parent[one] = parent[parent[one]]
            one = parent[one]
        return one

    first: dict[str, int] = {}
    for number, names in enumerate(pictures):
        for name in names:
            other = first.setdefault(name, number)
            low, high = sorted((root(number), root(other)))
            parent[high] = low
    groups: dict[int, list[int]] = {}
    for number in range(len(pictures)):
        groups.setdefault(root(number), []).append(number)
    return list(groups.values())
