"""Turns page tables into one `StepPlan` a forward: where new tokens go and what each row reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oval_core.pages import Run, SequencePages
from oval_core.values import PageSelection, RowPlan, RowRequest, Segment, StepPlan

_LONG_RUN = 128
"""Runs of this many slots are read in place; shorter ones are gathered together, one copy for all."""


def build_plan(
    sequences: Sequence[SequencePages],
    new_slots: Sequence[Sequence[int]],
    requests: Sequence[RowRequest],
    selection: PageSelection,
    num_queries: int,
    device: torch.device,
    needs_order: bool,
    bias: torch.Tensor | None,
) -> StepPlan:
    """Builds the plan of a forward whose tokens have just been appended.

    Args:
        sequences: the rows, new tokens included.
        new_slots: slots of each row's new tokens.
        requests: what each row brings.
        selection: runs that each row reads.
        num_queries: T.
        device: where index tensors must be.
        needs_order: whether some layer must know the token behind each key though T is 1 (a window).
        bias: see `StepPlan`.
    """
    rows = tuple(
        _row_plan(seq, request, runs, device, needs_order or num_queries > 1 or bias is not None)
        for seq, request, runs in zip(sequences, requests, selection.runs, strict=True)
    )
    write_run, slot_mapping, source = _writes(new_slots, requests, num_queries, device)
    stride = _stride(selection.runs) if num_queries == 1 and len(rows) > 1 else None
    if any(not row.is_plain or row.num_new != num_queries for row in rows):
        stride = None
    return StepPlan(num_queries, rows, write_run, slot_mapping, source, stride, bias)


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


def _row_plan(
    seq: SequencePages,
    request: RowRequest,
    runs: Sequence[Run],
    device: torch.device,
    needs_order: bool,
) -> RowPlan:
    order = seq.key_tokens() if needs_order else None
    key_tokens = None if order is None else torch.tensor(order, device=device)
    hidden = request.hidden
    if hidden is not None:
        hidden = torch.cat([hidden, hidden.new_zeros(request.num_new)])
        if order is None:
            order = seq.key_tokens()
        if order is not None:
            hidden = hidden[torch.tensor(order, device=hidden.device)]
    return RowPlan(
        num_new=request.num_new,
        length=sum(end - start for start, end in runs),
        segments=segments_of(runs, device),
        query_places=request.query_places,
        key_tokens=key_tokens,
        positions=request.positions,
        hidden=hidden,
    )


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
