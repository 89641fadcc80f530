"""Speculative decoding: drafters, token trees, verification, acceptance figures.

Knows token ids, logits and pages, not which model made them: it imports `oval_core` and never `transformers` or
`oval_mm`. Names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oval_spec.acceptance import DEFINITIONS, AcceptanceCounters
    from oval_spec.choices import TREES, generate_medusa_buffers, tree_named
    from oval_spec.drafter import Draft, Drafter, DraftRequest, NullDrafter
    from oval_spec.hybrid import HybridDrafter, merge_trees
    from oval_spec.ngram import NgramDrafter
    from oval_spec.token_tree import TokenTree
    from oval_spec.tree_cost import ForwardCost, choose_num_nodes
    from oval_spec.tree_search import expected_tau, grow_trees, search_tree, tau_by_nodes
    from oval_spec.tree_shape import TreeShape
    from oval_spec.turn_off import SpeculationSwitch
    from oval_spec.typical import TypicalVerifier
    from oval_spec.verifier import AcceptResult, Verifier
    from oval_spec.verify import GreedyVerifier, SamplingVerifier, create_verifier

__all__ = [
    "DEFINITIONS",
    "TREES",
    "AcceptResult",
    "AcceptanceCounters",
    "Draft",
    "DraftRequest",
    "Drafter",
    "ForwardCost",
    "GreedyVerifier",
    "HybridDrafter",
    "NgramDrafter",
    "NullDrafter",
    "SamplingVerifier",
    "SpeculationSwitch",
    "TokenTree",
    "TreeShape",
    "TypicalVerifier",
    "Verifier",
    "choose_num_nodes",
    "create_verifier",
    "expected_tau",
    "generate_medusa_buffers",
    "grow_trees",
    "merge_trees",
    "search_tree",
    "tau_by_nodes",
    "tree_named",
]

_HOMES = {
    "DEFINITIONS": "acceptance",
    "TREES": "choices",
    "AcceptResult": "verifier",
    "AcceptanceCounters": "acceptance",
    "Draft": "drafter",
    "DraftRequest": "drafter",
    "Drafter": "drafter",
    "ForwardCost": "tree_cost",
    "GreedyVerifier": "verify",
    "HybridDrafter": "hybrid",
    "NgramDrafter": "ngram",
    "NullDrafter": "drafter",
    "SamplingVerifier": "verify",
    "SpeculationSwitch": "turn_off",
    "TokenTree": "token_tree",
    "TreeShape": "tree_shape",
    "TypicalVerifier": "typical",
    "Verifier": "verifier",
    "choose_num_nodes": "tree_cost",
    "create_verifier": "verify",
    "expected_tau": "tree_search",
    "generate_medusa_buffers": "choices",
    "grow_trees": "tree_search",
    "merge_trees": "hybrid",
    "search_tree": "tree_search",
    "tau_by_nodes": "tree_search",
    "tree_named": "choices",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"oval_spec.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
