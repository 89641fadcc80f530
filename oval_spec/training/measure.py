"""What is measured on held-out answers: accuracy by head and rank, and what trees would gain. N positions, K heads."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from oval_spec.training.accuracy import TREE_SIZES, accuracy_table, rank_of, simulated_tau
from oval_spec.training.batches import Batches
from oval_spec.training.loss import Tick
from oval_spec.training.simulate import grown_tau
from oval_spec.tree_search import search_tree
from oval_spec.tree_shape import TOPK

_ROWS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Measures of heads.

    Attributes:
        positions: that were judged.
        top1: share of positions where each head's first token was right, [K]. A head that sees the path saw the right
            one. A token outside the draft vocabulary is a miss.
        top5: where it was among the first five, [K].
        accuracy: share where the token of each rank was right, [K][ranks].
        tau: tokens a step, bonus included, of the best fixed tree, by its drafted nodes.
    """

    positions: int
    top1: tuple[float, ...]
    top5: tuple[float, ...]
    accuracy: tuple[tuple[float, ...], ...]
    tau: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, ready for JSON."""
        return asdict(self)


@torch.no_grad()
def measure(batches: Batches) -> Measured:
    """Returns what heads reach on these examples.

    Args:
        batches: of held-out answers.
    """
    ranks, counted = all_ranks(batches)
    table = accuracy_table(ranks, counted, TOPK)
    lengths = batches.examples.lengths.tolist()
    tau = {
        str(size): simulated_tau(ranks, lengths, search_tree(table, size + 1))
        for size in TREE_SIZES
    }
    return Measured(
        positions=len(ranks),
        top1=tuple(row[0] for row in table),
        top5=tuple(sum(row[:5]) for row in table),
        accuracy=tuple(map(tuple, table)),
        tau=tau,
    )


@torch.no_grad()
def all_ranks(batches: Batches) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rank of the right token for each head, [N, K], and where there is one to predict, bool [N, K]."""
    examples = batches.examples
    ranks, counted = [], []
    for start in range(0, len(examples), _ROWS):
        rows = torch.arange(start, min(start + _ROWS, len(examples)), device=examples.tokens.device)
        targets = batches.targets(rows)
        logits = batches.logits(batches.states(rows))
        ranks.append(rank_of(logits.flatten(0, 1), targets.flatten()).view_as(targets))
        counted.append(batches.counted(rows))
    return torch.cat(ranks).cpu(), torch.cat(counted).cpu()


def tau_of_kinds(batches: Batches, num_nodes: int, tick: Tick) -> dict[str, float]:
    """Returns tokens a step of trees that grow by probability, by sort of prompt, and of all together as `all`.

    Args:
        batches: of held-out answers.
        num_nodes: nodes of a tree, the root included.
        tick: told how far it is.
    """
    steps, emitted = grown_tau(batches.heads, batches.examples, num_nodes, tick)
    kinds = batches.examples.kinds
    found = {}
    for kind in sorted(set(kinds)):
        own = torch.tensor([name == kind for name in kinds])
        found[kind] = _share(emitted[own], steps[own])
    return found | {"all": _share(emitted, steps)}


def _share(emitted: torch.Tensor, steps: torch.Tensor) -> float:
    return int(emitted.sum()) / max(1, int(steps.sum()))
