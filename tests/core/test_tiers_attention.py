"""Attention over keys cut into random parts equals the float64 oracle over all of them, on every backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from core.key_layouts import causal_bias
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import reference_attention

from oval_core.attention import backend_report, create_backend
from oval_core.attention.in_parts import attend_in_parts
from oval_core.attention.partial import merge, merge_parts
from oval_core.kv_pool import LayerStore
from oval_core.plan import build_plan, row_plan
from oval_core.values import LayerSpec, RowPages, RowRequest

CPU = torch.device("cpu")
BACKENDS = [name for name, is_ready, _ in backend_report() if is_ready]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Part:
    """Some tokens of a row, in a store of its own that holds NaN in between."""

    tokens: list[int]
    slots: list[int]


@st.composite
def cuts(draw: st.DrawFn, length: int, new: int) -> list[Part]:
    """The last part holds the new tokens; the old ones are dealt out in runs of 1 to 20."""
    num_parts = draw(st.integers(1, 11))
    dealt: list[list[int]] = [[] for _ in range(num_parts)]
    at = 0
    while at < length - new:
        size = draw(st.integers(1, 20))
        dealt[draw(st.integers(0, num_parts - 1))] += range(at, min(at + size, length - new))
        at += size
    dealt[-1] += range(length - new, length)
    parts = []
    for tokens in dealt:
        gaps = draw(st.lists(st.integers(0, 1), min_size=len(tokens), max_size=len(tokens)))
        slots, slot = [], draw(st.integers(0, 2))
        for gap in gaps:
            slot += 1 + gap * draw(st.integers(0, 2))
            slots.append(slot)
        parts.append(Part(tokens, slots))
    return parts


def runs_of(slots: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for slot in slots:
        if runs and runs[-1][1] == slot:
            runs[-1] = (runs[-1][0], slot + 1)
        else:
            runs.append((slot, slot + 1))
    return runs


def store_of(part: Part, keys: torch.Tensor, values: torch.Tensor) -> LayerStore:
    size = max(part.slots, default=0) + 3
    stores = []
    for side in (keys, values):
        store = torch.full((side.shape[0], size, side.shape[2]), float("nan"), dtype=side.dtype)
        store[:, part.slots] = side[:, part.tokens]
        stores.append(store)
    return LayerStore(*stores)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, object]:
    heads = draw(st.sampled_from([(4, 2), (3, 3), (4, 1), (9, 3)]))
    length = draw(st.integers(1, 120))
    new = draw(st.sampled_from([1, 1, min(5, length), min(33, length)]))
    how = draw(st.sampled_from(["plain", "plain", "window", "hidden", "both", "bias"]))
    return {
        "heads": heads,
        "dims": draw(st.sampled_from([(16, 16), (8, 16)])),
        "length": length,
        "new": new,
        "parts": draw(cuts(length, new)),
        "pad": draw(st.sampled_from([0, 0, 2])),
        "window": draw(st.integers(1, 40)) if how in ("window", "both") else None,
        "hide": draw(st.sampled_from([0.5, 1.0])) if how in ("hidden", "both") else 0.0,
        "biased": how == "bias",
        "softcap": draw(st.sampled_from([None, None, 5.0])),
        "seed": draw(st.integers(0, 99)),
    }


def solve(backend_name: str, problem: dict, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """What the backend says and what is right, [T, H, E] both."""
    torch.manual_seed(problem["seed"])
    (heads, kv_heads), (dim, value_dim) = problem["heads"], problem["dims"]
    length, new, parts = problem["length"], problem["new"], problem["parts"]
    queries = new + problem["pad"]
    keys = torch.randn(kv_heads, length, dim).to(dtype)
    values = torch.randn(kv_heads, length, value_dim).to(dtype)
    query = torch.randn(1, heads, queries, dim).to(dtype)
    places = torch.arange(problem["pad"], queries)
    hidden = torch.rand(length - new) < problem["hide"] if problem["hide"] else None
    bias = causal_bias(1, heads, queries, length) if problem["biased"] else None
    spec = LayerSpec(0.3, problem["window"], problem["softcap"])
    request = RowRequest(new, places if problem["pad"] else None, hidden)
    exact = hidden is not None or bias is not None or spec.window is not None

    def rows(part: Part, is_last: bool) -> RowPages:
        needed = exact or (is_last and new > 1 and part.tokens != list(range(length)))
        new_slots = part.slots[len(part.slots) - new :] if is_last else []
        return RowPages(runs_of(part.slots), part.tokens if needed else None, new_slots, length)

    *past, last = parts
    plan = build_plan([rows(last, True)], [request], queries, CPU, bias)
    sources = [(store_of(last, keys, values), list(enumerate(plan.rows)))]
    sources += [
        (store_of(p, keys, values), [(0, row_plan(rows(p, False), request, CPU, is_past=True))])
        for p in past
        if p.tokens
    ]
    out = attend_in_parts(create_backend(backend_name), query, plan, spec, iter(sources))
    want = torch.zeros(queries, heads, value_dim, dtype=torch.float64)
    mask = None if hidden is None else torch.cat([hidden, hidden.new_zeros(new)])
    want[places] = reference_attention(
        query[0][:, places], keys, values, 0.3, spec.window, spec.softcap, hidden=mask,
        bias=None if bias is None else bias[0][:, places],
    ).transpose(0, 1)  # fmt: skip
    return out[0], want


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=90, deadline=None, derandomize=True)
@given(problem=problems(), dtype=st.sampled_from(list(TOLERANCE)))
def test_parts_equal_the_whole(backend: str, problem: dict, dtype: torch.dtype) -> None:
    out, want = solve(backend, problem, dtype)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("window", [None, 6])
def test_parts_of_which_nothing_is_seen(backend: str, new: int, window: int | None) -> None:
    """All old keys are hidden or out of the window: -inf and zeros, and no NaN in the sum."""
    torch.manual_seed(0)
    store = LayerStore(torch.randn(2, 40, 16), torch.randn(2, 40, 16))
    query = torch.randn(4, new, 16)
    hidden = torch.ones(50, dtype=torch.bool) if window is None else None
    where = RowPages([(0, 40)], list(range(40)), (), 50 + new)
    row = row_plan(where, RowRequest(new, None, hidden), CPU, is_past=True)
    spec = LayerSpec(0.3, window)
    unseen = create_backend(backend).attend_parts(query, store, row, spec, None)
    for out, lse in unseen:
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
    some = (torch.randn(4, new, 16), torch.randn(4, new))
    assert torch.equal(merge([*unseen, some]), some[0])
    out, lse = merge_parts([*unseen, some])
    torch.testing.assert_close((out, lse), some)
    out, lse = merge_parts(unseen * 2)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("new", [1, 3])
def test_log_sum_exps_are_those_of_the_keys(backend: str, new: int) -> None:
    torch.manual_seed(1)
    for dtype, tolerance in TOLERANCE.items():
        store = LayerStore(torch.randn(2, 64, 16).to(dtype), torch.randn(2, 64, 16).to(dtype))
        query = torch.randn(4, new, 16).to(dtype)
        runs = [(3, 20), (25, 60)]
        row = row_plan(RowPages(runs, None, (), 99), RowRequest(new), CPU, is_past=True)
        parts = create_backend(backend).attend_parts(query, store, row, LayerSpec(0.3), None)
        slots = [s for a, b in runs for s in range(a, b)]
        keys, values = store.keys[:, slots].double(), store.values[:, slots].double()
        scores = query.double().view(2, 2 * new, 16) @ keys.transpose(1, 2) * 0.3
        got_out, got_lse = merge_parts(parts)
        want = (torch.softmax(scores, -1) @ values).view(4, new, 16)
        lse = torch.logsumexp(scores, -1).view(4, new)
        torch.testing.assert_close(got_lse.double(), lse, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(got_out.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("num_parts", [1, 7, 8, 9, 30])
def test_many_parts_merge_as_one(num_parts: int) -> None:
    torch.manual_seed(2)
    scores = torch.randn(3, 2, 30 * 4, dtype=torch.float64) * 20
    values = torch.randn(3, 30 * 4, 5, dtype=torch.float64)
    pieces = scores.tensor_split(num_parts, -1), values.tensor_split(num_parts, 1)
    parts = [
        ((torch.softmax(s, -1) @ v).float(), torch.logsumexp(s, -1).float())
        for s, v in zip(*pieces, strict=True)
    ]
    want = torch.softmax(scores, -1) @ values
    out, lse = merge_parts(parts)
    torch.testing.assert_close(out.double(), want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lse.double(), torch.logsumexp(scores, -1), atol=1e-4, rtol=1e-4)
    nested = [merge_parts(parts[:3]), *parts[3:]]
    torch.testing.assert_close(merge(nested).double(), want, atol=1e-4, rtol=1e-4)
