"""Turns page tables into one `StepPlan` a forward: where new tokens go and what each row reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from oval_core.pages import Run, SequencePages, merge_runs
from oval_core.values import RowPages, RowPlan, RowRequest, Segment, StepPlan

_LONG_RUN = 128
"""Runs of this many slots are read in place; shorter ones are gathered together, one copy for all."""


def build_plan(
    rows: Sequence[RowPages],
    requests: Sequence[RowRequest],
    num_queries: int,
    device: torch.device,
    bias: torch.Tensor | None,
) -> StepPlan:
    """Builds the plan of a forward whose tokens have just been appended.

    Args:
        rows: where the keys of each row lie, new tokens included.
        requests: what each row brings.
        num_queries: T.
        device: where index tensors must be.
        bias: see `StepPlan`.
    """
    plans = tuple(
        row_plan(pages, request, device) for pages, request in zip(rows, requests, strict=True)
    )
    new_slots = [pages.new_slots for pages in rows]
    write_run, slot_mapping, source = _writes(new_slots, requests, num_queries, device)
    stride = _stride([pages.runs for pages in rows]) if num_queries == 1 and len(rows) > 1 else None
    if any(not plan.is_plain or plan.num_new != num_queries for plan in plans):
        stride = None
    return StepPlan(num_queries, plans, write_run, slot_mapping, source, stride, bias)


def with_depths(
    requests: Sequence[RowRequest], sequences: Sequence[SequencePages], has_windows: bool
) -> list[RowRequest]:
    """Returns requests with trees made ready: chains are causal, and windows are told how deep tokens of others are.

    Args:
        requests: what each row brings.
        sequences: the rows before.
        has_windows: whether some layer has a sliding window.
    """
    ready = []
    for request, seq in zip(requests, sequences, strict=True):
        tree, positions, cached = request.tree, request.positions, seq.num_committed
        if tree is not None:
            assert tree.shape == (request.num_new, request.num_new), "a tree is [num_new, num_new]"
            assert bool(tree.diagonal().all()), "each token of a tree sees itself"
            if torch.equal(tree, torch.ones_like(tree).tril()):
                tree = None
            elif has_windows and positions is None:
                positions = torch.cat([torch.arange(cached), cached - 1 + tree.sum(1).cpu()])
        ready.append(replace(request, tree=tree, positions=positions))
    return ready


def row_plan(
    pages: RowPages, request: RowRequest, device: torch.device, is_past: bool = False
) -> RowPlan:
    """Builds the plan of one row over the keys that lie in one place; see `RowPlan` for `is_past`."""
    key_tokens = None
    if pages.key_tokens is not None:
        key_tokens = torch.tensor(pages.key_tokens, dtype=torch.long, device=device)
    page_slots = None
    if pages.page_starts:
        page_slots = torch.tensor([pages.page_starts, [size for _, size in pages.pages]])
    hidden = request.hidden
    if hidden is not None:
        hidden = torch.cat([hidden, hidden.new_zeros(request.num_new)])
        if key_tokens is not None:
            hidden = hidden[key_tokens.to(hidden.device)]
    return RowPlan(
        num_new=request.num_new,
        num_tokens=pages.num_tokens,
        length=sum(end - start for start, end in pages.runs),
        segments=segments_of(pages.runs, device),
        is_past=is_past,
        query_places=request.query_places,
        key_tokens=key_tokens,
        positions=request.positions,
        hidden=hidden,
        pages=pages.pages,
        page_slots=page_slots,
        tree=request.tree,
        by_position=request.by_position,
        ordered=None if is_past else _ordered(pages, request, device),
    )


def _ordered(
    pages: RowPages, request: RowRequest, device: torch.device
) -> tuple[Segment, ...] | None:
    """Returns all keys of a row in token order, where that alone decides: then a prompt with images is plainly causal."""
    tokens = pages.key_tokens
    simple = request.positions is None and request.hidden is None and request.tree is None
    if tokens is None or request.num_new < 2 or not simple or len(tokens) != pages.num_tokens:
        return None
    slots = [0] * len(tokens)
    places = (slot for start, end in pages.runs for slot in range(start, end))
    for slot, token in zip(places, tokens, strict=True):
        slots[token] = slot
    return segments_of(merge_runs([(slot, slot + 1) for slot in slots]), device)


def segments_of(runs: Sequence[Run], device: torch.device) -> tuple[Segment, ...]:
    """Groups runs into segments: long runs as slices, the short ones between them gathered."""
    segments: list[Segment] = []
    short: list[Run] = []

    def flush() -> None:
        if len(short) == 1:
            segments.append(slice(*short[0]))
        elif short:
            slots = [slot for start, end in short for slot in range(start, end)]
            segments.append(torch.tensor(slots, device=device))
        short.clear()

    for start, end in runs:
        if end - start < _LONG_RUN:
            short.append((start, end))
        else:
            flush()
            segments.append(slice(start, end))
    flush()
    return tuple(segments)


def _writes(
    new_slots: Sequence[Sequence[int]],
    requests: Sequence[RowRequest],
    num_queries: int,
    device: torch.device,
) -> tuple[slice | None, torch.Tensor | None, torch.Tensor | None]:
    first = new_slots[0]
    lone = len(new_slots) == 1 and len(first) == num_queries
    if lone and list(first) == list(range(first[0], first[0] + num_queries)):
        return slice(first[0], first[0] + num_queries), None, None
    flat = [slot for slots in new_slots for slot in slots]
    mapping = torch.tensor(flat, dtype=torch.long, device=device)
    if all(request.query_places is None for request in requests):
        return None, mapping, None
    places = [
        row * num_queries
        + (
            torch.arange(num_queries, device=device)
            if request.query_places is None
            else request.query_places
        )
        for row, request in enumerate(requests)
    ]
    return None, mapping, torch.cat(places)


def _stride(runs: Sequence[Sequence[Run]]) -> tuple[int, int] | None:
    if any(len(row) != 1 for row in runs):
        return None
    (start, end), (second, _) = runs[0][0], runs[1][0]
    stride = second - start
    equal = all(row[0] == (start + i * stride, end + i * stride) for i, row in enumerate(runs))
    return (start, stride) if equal and stride > 0 else None
