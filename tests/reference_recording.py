"""Slow oracles of recordings: what HF's own attention maps say, page by page, head by head, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oval_core.routing.recording import Recording


@dataclass(frozen=True)
class DensePassage:
    """One passage run in one piece on HF's eager attention.

    Attributes:
        weights: by layer [H, L, L].
        values: by layer [K, L, E].
        keys: by layer [K, L, D], after RoPE.
        hidden: [L, C] last hidden states.
        inputs: by layer [L, C], what each decoder layer was given.
    """

    weights: list[torch.Tensor]
    values: list[torch.Tensor]
    keys: list[torch.Tensor]
    hidden: torch.Tensor
    inputs: list[torch.Tensor]


def _members(pages: list[list[int]], length: int) -> torch.Tensor:
    """[P, L]: 1 where a token belongs to a page."""
    members = torch.zeros(len(pages), length)
    for page, tokens in enumerate(pages):
        members[page, tokens] = 1
    return members


def reference_page_mass(
    dense: DensePassage, tokens: slice, pages: list[list[int]], layers: list[int]
) -> torch.Tensor:
    """Returns [len(layers), H, len(tokens), P]: the attention that the queries of tokens give to each page."""
    members = _members(pages, len(dense.hidden))
    return torch.stack([dense.weights[layer][:, tokens] @ members.T for layer in layers])


def reference_effect(
    dense: DensePassage, token: int, pages: list[list[int]], layer: int, head: int
) -> torch.Tensor:
    """Returns [P]: how far a head's output moves when a page is masked and the weights renormalised, over its norm."""
    weights = dense.weights[layer][head, token]
    kv_head = head * len(dense.values[layer]) // len(dense.weights[layer])
    values = dense.values[layer][kv_head]
    whole = weights @ values
    rest = weights * (1 - _members(pages, len(weights)))
    without = rest / rest.sum(-1, keepdim=True) @ values
    return (without - whole).norm(dim=-1) / whole.norm()


def reference_signal(
    formula: str, query: torch.Tensor, keys: torch.Tensor, scaling: float
) -> float:
    """Returns the score of a page whose keys [n, D] are given, by the formula alone."""
    if formula == "quest":
        return sum(
            scaling * max(q * min(column), q * max(column))
            for q, column in zip(query.tolist(), keys.T.tolist(), strict=True)
        )
    assert formula == "mean_key"
    return scaling * float(keys.mean(0) @ query)


def reference_output_error(recording: Recording, selections: torch.Tensor) -> float:
    """Mean error of the output over sampled steps, layers and heads, one at a time."""
    routed = [group for group in recording.group_of_layer if group >= 0]
    errors = []
    for place, step in enumerate(recording.sampled.tolist()):
        for layer, group in enumerate(routed):
            chosen = [p for p, own in enumerate(selections[step, group].tolist()) if own]
            for head in range(recording.part_mass.shape[2]):
                parts = recording.part_output[place, layer, head].double()
                mass = recording.part_mass[place, layer, head].double()
                whole = sum(parts[p] for p in range(len(parts))) / mass.sum()
                sparse = sum(parts[p] for p in chosen) / sum(mass[p] for p in chosen)
                errors.append(float((sparse - whole).norm() / whole.norm()))
    return sum(errors) / len(errors)


def reference_page_recall(recording: Recording, selections: torch.Tensor) -> float:
    """Mean share of each selection of k pages that is among the k heaviest."""
    shares = []
    for step in range(selections.shape[0]):
        for group in range(selections.shape[1]):
            chosen = set(selections[step, group].nonzero()[:, 0].tolist())
            mass = recording.mass[step, group].tolist()
            best = sorted(range(len(mass)), key=lambda page: -mass[page])[: len(chosen)]
            shares.append(len(chosen & set(best)) / len(chosen))
    return sum(shares) / len(shares)


def reference_bytes(recording: Recording, step: int, pages: list[torch.Tensor]) -> int:
    """Bytes of pages, bool [P] by group, as far as they are committed before a step, in all layers of the groups."""
    committed = recording.context + step
    bytes_ = 0
    for group in recording.group_of_layer:
        if group < 0:
            continue
        for page in pages[group].nonzero()[:, 0].tolist():
            start, count = int(recording.starts[page]), int(recording.counts[page])
            bytes_ += (
                sum(t < committed for t in range(start, start + count)) * recording.token_bytes
            )
    return bytes_
