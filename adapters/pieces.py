"""Runs one decoder forward as several on the same cache, where fast memory takes only so many new tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from oval_core.errors import FastMemoryError

__all__ = ["merge_outputs", "split_call"]

_BY_QUERY = ("input_ids", "inputs_embeds", "position_ids")
"""Arguments [B, T, ...] or [1, T, ...] of a decoder, cut along T."""


def split_call(
    kwargs: Mapping[str, Any], num_queries: int, end_of: Callable[[int], int], cached: int
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yields first column, end and arguments of each piece.

    Args:
        kwargs: of the whole forward, by name.
        num_queries: T.
        end_of: gives the end of the piece that begins at a column; asked when the pieces before have run.
        cached: columns in the cache before.
    Raises:
        FastMemoryError: an argument has a column for each new token and nobody knows how to cut it.
    """
    _check_known(kwargs, num_queries)
    mask = kwargs.get("attention_mask")
    start = 0
    while start < num_queries:
        end = end_of(start)
        piece = {**kwargs, "return_dict": True}
        for name in _BY_QUERY:
            value = kwargs.get(name)
            if value is not None:
                piece[name] = value[:, start:end]
        if mask is not None and mask.ndim == 4:
            piece["attention_mask"] = mask[:, :, start:end, : cached + end]
        elif mask is not None:
            piece["attention_mask"] = mask[:, : cached + end]
        yield start, end, piece
        start = end


def merge_outputs(outputs: list[Any], wants_tuple: bool) -> Any:
    """Joins the outputs of the pieces: last hidden states, and those of all layers where they were asked for."""
    last = outputs[-1]
    whole = {"last_hidden_state": torch.cat([o.last_hidden_state for o in outputs], 1)}
    if last.hidden_states is not None:
        layers = zip(*[output.hidden_states for output in outputs], strict=True)
        whole["hidden_states"] = tuple(torch.cat(layer, 1) for layer in layers)
    merged = replace(last, **whole)
    return merged.to_tuple() if wants_tuple else merged


def _check_known(kwargs: Mapping[str, Any], num_queries: int) -> None:
    for name, value in kwargs.items():
        by_query = torch.is_tensor(value) and value.ndim > 1 and value.shape[1] == num_queries
        if by_query and name not in (*_BY_QUERY, "attention_mask"):
            raise FastMemoryError(
                f"forward: got {num_queries} new tokens with {name!r}, more than fast memory takes at once, and OVAL does "
                "not know how to cut that argument. Allowed: fewer tokens a forward. Pass prefill_chunk_size, or "
                "raise tiers.fast_tokens."
            )
