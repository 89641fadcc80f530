"""Rows of keys that lie in a pool in every way that pages can. Unused slots hold NaN, so an over-read shows.

Shapes: B rows, T queries, H heads, K KV heads, L keys of a row, D and E head dims, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from reference import reference_attention

from oval_core.attention import create_backend
from oval_core.kv_pool import LayerStore
from oval_core.pages import Page, SequencePages
from oval_core.plan import build_plan
from oval_core.values import LayerSpec, RowPages, RowRequest, StepPlan

CPU = torch.device("cpu")

Slots = list[int]
"""Slot of each token of a row, in token order."""

PageSlots = list[tuple[list[int], list[int]]]
"""(slots, tokens) of each page of a row."""


def pages_of(slots: Slots, page_size: int = 16) -> PageSlots:
    places = range(0, len(slots), page_size)
    return [(slots[i : i + page_size], list(range(len(slots)))[i : i + page_size]) for i in places]


def one_run(length: int) -> PageSlots:
    return pages_of(list(range(5, 5 + length)))


def many_short_runs(length: int) -> PageSlots:
    return pages_of([2 + i + 3 * (i // 16) for i in range(length)])


def permuted_image_pages(length: int) -> PageSlots:
    """Tokens [1/4, 3/4) are an image in interleaved pages; text before and behind it."""
    start, end = length // 4, 3 * length // 4
    image = list(range(start, end))
    groups = [image[i::7] for i in range(7) if image[i::7]]
    pages, slot = pages_of(list(range(3, 3 + start))), 10 + length
    for group in groups:
        pages.append((list(range(slot, slot + len(group))), group))
        slot += len(group) + 2
    tail = list(range(end, length))
    if tail:
        pages.append((list(range(slot, slot + len(tail))), tail))
    return pages


def refilled_pages(length: int) -> PageSlots:
    """Slots run backwards within each page, as after the places of rejected tokens were taken again."""
    return [(list(reversed(slots)), tokens) for slots, tokens in one_run(length)]


def long_and_short_runs(length: int) -> PageSlots:
    """Runs of 128, 16, 16, 127, ... slots: some read in place, some gathered."""
    slots: Slots = []
    at, sizes = 1, (128, 16, 16, 127, 129, 5)
    while len(slots) < length:
        for size in sizes:
            slots += range(at, at + size)
            at += size + 3
    return pages_of(slots[:length], 1)


def shifted(pages: PageSlots, distance: int) -> PageSlots:
    return [([slot + distance for slot in slots], tokens) for slots, tokens in pages]


@dataclass
class Case:
    """A pool, its plan, the queries, and everything the oracle needs."""

    query: torch.Tensor  # [B, H, T, D]
    store: LayerStore
    plan: StepPlan
    keys: list[torch.Tensor]  # [K, L, D] of each row, in token order
    values: list[torch.Tensor]
    places: list[torch.Tensor]
    masks: list[torch.Tensor | None]
    bias: torch.Tensor | None = None

    def run(self, backend: str, spec: LayerSpec) -> torch.Tensor:
        return create_backend(backend).attend(self.query, self.store, self.plan, spec)

    def want(self, spec: LayerSpec) -> torch.Tensor:
        """[B, T, H, E] float64, padding zero."""
        batch, heads, queries, _ = self.query.shape
        out = torch.zeros(batch, queries, heads, self.values[0].shape[2], dtype=torch.float64)
        for row, places in enumerate(self.places):
            if not len(places):
                continue
            bias = None
            if self.bias is not None:
                bias = self.bias[row if self.bias.shape[0] > 1 else 0][:, places]
            out[row, places] = reference_attention(
                self.query[row][:, places], self.keys[row], self.values[row], spec.scaling,
                spec.window, spec.softcap, hidden=self.masks[row], bias=bias,
            ).transpose(0, 1)  # fmt: skip
        return out


def make_case(
    rows: Sequence[PageSlots],
    counts: Sequence[int],
    num_queries: int,
    heads: tuple[int, int],
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    hide: float = 0.0,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    needs_order: bool = True,
) -> Case:
    """Builds the forward of the last counts[row] tokens of each row; padding is on the left."""
    top = 7 + max(slot for pages in rows for slots, _ in pages for slot in slots)
    pool_k = torch.full((heads[1], top, dims[0]), float("nan"), dtype=dtype)
    pool_v = torch.full((heads[1], top, dims[1]), float("nan"), dtype=dtype)
    sequences, new_slots, requests, keys, values, places, masks = [], [], [], [], [], [], []
    for pages, count in zip(rows, counts, strict=True):
        seq = SequencePages()
        seq.pages = [Page(0, slots[0], len(slots), slots=slots, tokens=t) for slots, t in pages]
        seq.length = sum(len(tokens) for _, tokens in pages)
        seq.num_committed = seq.length - count
        seq.changed()
        token_slots = seq.token_slots()
        pool_k[:, token_slots] = (scale * torch.randn(heads[1], seq.length, dims[0])).to(dtype)
        pool_v[:, token_slots] = torch.randn(heads[1], seq.length, dims[1]).to(dtype)
        hidden = torch.rand(seq.length - count) < hide if hide else None
        at = torch.arange(num_queries - count, num_queries)
        sequences.append(seq)
        new_slots.append(token_slots[seq.length - count :])
        requests.append(RowRequest(count, None if count == num_queries else at, hidden))
        keys.append(pool_k[:, token_slots])
        values.append(pool_v[:, token_slots])
        places.append(at)
        shown = torch.zeros(count, dtype=torch.bool)
        masks.append(None if hidden is None else torch.cat([hidden, shown]))
    ordered = needs_order or num_queries > 1 or bias is not None
    pages = [
        RowPages(
            seq.runs(),
            seq.key_tokens() if ordered or request.hidden is not None else None,
            slots,
            seq.length,
        )
        for seq, slots, request in zip(sequences, new_slots, requests, strict=True)
    ]
    plan = build_plan(pages, requests, num_queries, CPU, bias)
    query = torch.randn(len(rows), heads[0], num_queries, dims[0]).to(dtype)
    return Case(query, LayerStore(pool_k, pool_v), plan, keys, values, places, masks, bias)


def causal_bias(batch: int, heads: int, queries: int, length: int) -> torch.Tensor:
    """A random additive mask; the future is -inf."""
    bias = torch.randn(batch, heads, queries, length)
    future = torch.arange(length)[None] > torch.arange(length - queries, length)[:, None]
    return bias.masked_fill(future, float("-inf"))


Build = Callable[[int, int, tuple[int, int], torch.dtype], Case]


def _single(layout: Callable[[int], PageSlots]) -> Build:
    return lambda length, t, heads, dtype: make_case([layout(length)], [t], t, heads, dtype=dtype)


def _even(length: int, t: int, heads: tuple[int, int], dtype: torch.dtype) -> Case:
    rows = [pages_of(list(range(a, a + length))) for a in (4, 4 + length + 9, 4 + 2 * length + 18)]
    case = make_case(rows, [t] * 3, t, heads, dtype=dtype)
    assert t > 1 or case.plan.stride == (4, length + 9)
    return case


def _ragged(length: int, t: int, heads: tuple[int, int], dtype: torch.dtype) -> Case:
    rows = [many_short_runs(length), pages_of(list(range(2 * length, 3 * length - 3)))]
    return make_case(rows, [t, t - 1], t, heads, dtype=dtype)


def _hidden(length: int, t: int, heads: tuple[int, int], dtype: torch.dtype) -> Case:
    rows = [permuted_image_pages(length), pages_of(list(range(3 * length, 4 * length)))]
    return make_case(rows, [t, t], t, heads, dtype=dtype, hide=0.4)


def _biased(length: int, t: int, heads: tuple[int, int], dtype: torch.dtype) -> Case:
    rows = [permuted_image_pages(length), pages_of(list(range(3 * length, 4 * length)))]
    bias = causal_bias(2, heads[0], t, length)
    return make_case(rows, [t, t], t, heads, dtype=dtype, bias=bias)


LAYOUTS: dict[str, Build] = {
    "one run": _single(one_run),
    "many short runs": _single(many_short_runs),
    "permuted image pages": _single(permuted_image_pages),
    "refilled pages": _single(refilled_pages),
    "long and short runs": _single(long_and_short_runs),
    "even batch": _even,
    "ragged batch": _ragged,
    "hidden keys": _hidden,
    "bias": _biased,
}
