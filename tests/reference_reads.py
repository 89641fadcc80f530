"""Slow oracle of page reports: Hugging Face's own attention maps, summed by page."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def attention_maps(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Returns attention [Y, B, L, L] of every layer over a whole text, mean over heads."""
    before = model.config.get_text_config(decoder=True)._attn_implementation
    model.set_attn_implementation("eager")
    try:
        output = model(input_ids=ids, output_attentions=True, **inputs)
    finally:
        model.set_attn_implementation(before)
    return torch.stack([own.float().mean(1) for own in output.attentions])


def page_mass(
    maps: torch.Tensor, row: int, asking: list[int], pages: list[tuple[int, ...]], layers: list[int]
) -> torch.Tensor:
    """Returns [T, P] what queries in the columns `asking` of a row gave the columns of each page, mean over layers."""
    found = torch.zeros(len(asking), len(pages))
    for t, column in enumerate(asking):
        for p, columns in enumerate(pages):
            for other in columns:
                found[t, p] += maps[layers, row, column, other].mean()
    return found
