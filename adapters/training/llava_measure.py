"""How often a small LLaVA is right on new pictures: vanilla and circular, by sort of question."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from PIL.Image import Image

from oval_adapters.training.llava_features import FeatureStore
from oval_adapters.training.llava_rows import Row, collate
from oval_adapters.training.llava_student import Student
from oval_mm.scenes import Item, Library, draw

__all__ = ["measure"]

_ROWS = 6

Checks = Sequence[tuple[Item, Row]]


def measure(
    student: Student,
    store: FeatureStore,
    library: Library,
    checks: Checks,
    image_token: int,
    tick: Callable[[int], None],
) -> dict[str, Any]:
    """Returns shares of right answers.

    Args:
        student: in evaluation mode or not; it has no dropout.
        store: of features.
        library: to draw with.
        checks: from `check_rows`.
        image_token: id.
        tick: told how many rows are done.

    Returns:
        `vanilla` (first order of the options), `all_orders` (every order for itself), `circular` (right in every order),
        each over all questions, and `vanilla` and `circular` `by_task`.
    """
    hits: dict[str, list[list[bool]]] = defaultdict(list)
    for start in range(0, len(checks), _ROWS):
        part = checks[start : start + _ROWS]
        pictures: list[Image] = [draw(scene, library) for item, _ in part for scene in item.scenes]
        right = student.hits(collate([row for _, row in part], image_token), store.of(pictures))
        for item, row in part:
            hits[item.choice.task].append(right[: len(row.parts)])
            right = right[len(row.parts) :]
        tick(start + len(part))
    whole = [orders for task in hits.values() for orders in task]
    by_task = {
        task: {"questions": len(own), "vanilla": _vanilla(own), "circular": _circular(own)}
        for task, own in hits.items()
    }
    return {
        "questions": len(whole),
        "vanilla": _vanilla(whole),
        "all_orders": _mean([hit for orders in whole for hit in orders]),
        "circular": _circular(whole),
        "by_task": by_task,
    }


def _vanilla(orders: Sequence[Sequence[bool]]) -> float:
    return _mean([own[0] for own in orders])


def _circular(orders: Sequence[Sequence[bool]]) -> float:
    return _mean([all(own) for own in orders])


def _mean(hits: Sequence[bool]) -> float:
    return sum(hits) / max(1, len(hits))
