"""Trees that ship with Medusa, by their upstream names, and what turns `medusa_choices` into a shape.

Each is written as the parents of its nodes, most valuable first: upstream found the trees by adding one node at a time,
always a parent's next rank, so that the list of parents says all. Node 0 is the root.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import torch

from oval_core.errors import ConfigError, did_you_mean
from oval_spec.tree_shape import TreeShape

_PARENTS = {
    "mc_sim_7b_63": (
        "0 1 0 1 0 2 3 1 0 1 0 1 5 1 2 0 1 0 1 4 3 0 1 2 9 1 0 0 7 8 3 2 11 5 2 2 6 4 2 10 16 3 2 "
        "2 2 18 12 3 22 4 13 9 5 27 14 3 7 8 28 17 6 3 19"
    ),
    "vicuna_7b_stage2": (
        "0 1 0 1 2 3 0 1 2 1 0 4 7 0 2 1 3 6 5 0 2 1 8 11 4 1 0 1 2 14 3 1 0 10 5 2 7 2 6 9 13 20 "
        "1 4 0 16 8 3 2 5 2 17 12 27 0 4 5 6 22 11 15 33 3"
    ),
    "vicuna_7b_stage1_ablation": (
        "0 1 0 2 1 3 0 1 2 0 1 5 7 2 1 0 4 6 3 2 8 1 0 10 5 1 0 2 3 4 16 2 1 1 11 9 6 0 13 2 7 5 "
        "23 8 1 4 15 0 3 2 12 19 27 0 2 2 22 14 6 5 4 24 10"
    ),
    "vicuna_7b_stage1": (
        "0 1 0 0 1 3 0 1 0 2 1 0 4 1 0 1 3 2 0 7 1 0 0 5 1 1 9 2 3 1 4 12 6 2 3 8 5 2 15 3 2 4 11 "
        "7 2 19 3 6 13 2 22 10 9 5 14 23 8 4 3 2 16 7 12"
    ),
    "vicuna_13b_stage2": (
        "0 1 0 2 1 3 0 1 2 5 0 1 7 2 4 1 6 3 0 2 1 8 0 11 5 1 2 4 1 2 3 9 12 6 19 2 1 13 1 0 0 7 "
        "23 5 4 0 16 10 8 2 18 3 14 0 2 21 4 2 5 6 9 24 17"
    ),
    "vicuna_13b_stage1": (
        "0 1 0 1 0 3 2 1 0 1 0 5 1 2 1 0 3 4 0 1 2 0 9 0 1 1 6 2 11 3 0 1 5 8 2 3 4 2 16 10 7 2 "
        "19 3 12 4 9 13 6 5 2 3 22 2 24 15 2 8 17 4 11 5 3"
    ),
    "vicuna_33b_stage2": (
        "0 1 0 1 2 3 0 1 2 1 0 4 7 1 0 2 3 6 1 0 5 2 11 8 1 4 0 2 1 0 3 15 0 10 2 5 1 7 1 6 13 2 "
        "20 9 3 4 14 2 8 0 17 5 27 2 12 30 4 19 3 2 11 6 7"
    ),
    "vicuna_33b_stage1": (
        "0 0 1 0 1 0 2 0 1 0 1 3 0 1 4 0 2 1 6 0 0 1 1 3 2 8 5 1 1 4 3 10 2 3 7 2 13 9 6 4 3 16 5 "
        "2 8 3 11 21 20 2 3 4 5 6 14 15 2 7 3 10 4 3 9"
    ),
    "zephyr_stage2": (
        "0 1 0 1 0 2 3 1 0 1 0 5 2 1 0 1 4 3 0 2 9 1 0 1 1 2 7 1 8 3 11 0 0 5 4 2 6 15 10 3 2 2 "
        "19 12 7 4 14 3 9 5 2 23 8 2 4 16 3 2 18 6 13 11 5"
    ),
}

TREES: Mapping[str, TreeShape] = MappingProxyType(
    {name: TreeShape.from_parents(map(int, parents.split())) for name, parents in _PARENTS.items()}
)
"""Shipped trees, 64 nodes each. `mc_sim_7b_63` is for any model; the others were measured on the model they name."""


def tree_named(name: str) -> TreeShape:
    """Returns a shipped tree; an unknown name raises `ConfigError`."""
    if name not in TREES:
        raise ConfigError(f"speculation.tree: got {name!r}; {did_you_mean(name, TREES)}")
    return TREES[name]


def generate_medusa_buffers(
    medusa_choices: Iterable[Sequence[int]], device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Returns the buffers of a tree under Medusa's names: see `TreeShape.medusa_buffers`."""
    return TreeShape.of(medusa_choices).medusa_buffers(device)
