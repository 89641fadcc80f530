"""One suite for every backend: equal to a float64 oracle on every layout, window, soft cap and length."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from core.key_layouts import (
    LAYOUTS,
    Case,
    causal_bias,
    long_and_short_runs,
    make_case,
    many_short_runs,
    one_run,
    permuted_image_pages,
    shifted,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oval_core.attention import (
    backend_report,
    create_backend,
    dense,
    resolve_backend,
    torch_backend,
)
from oval_core.attention.base import query_tiles, split_segments
from oval_core.errors import BackendUnavailableError, ConfigError
from oval_core.kv_pool import LayerStore
from oval_core.plan import segments_of
from oval_core.values import LayerSpec

BACKENDS = [name for name, is_ready, _ in backend_report() if is_ready]  # native needs a compiler
HEADS = [(9, 3), (4, 4), (6, 1), (8, 2)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@functools.cache
def cases(layout: str, heads: tuple[int, int], dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """(case, spec, wanted) for every number of queries, window and soft cap; shared by the backends."""
    torch.manual_seed(len(layout) + 10 * heads[0])
    made = []
    for queries in (1, 5, 33):
        case = LAYOUTS[layout](
            150 if layout != "long and short runs" else 431, queries, heads, dtype
        )
        for window in (None,) if case.bias is not None else (None, 7, 64):
            for softcap in (None, 20.0):
                spec = LayerSpec(scaling=0.3, window=window, softcap=softcap)
                made.append((case, spec, case.want(spec)))
    return made


def assert_equal(case: Case, backend: str, spec: LayerSpec, want: torch.Tensor) -> None:
    out = case.run(backend, spec)
    assert out.shape == want.shape
    assert out.dtype == case.query.dtype
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_oracle(
    layout: str, heads: tuple[int, int], dtype: torch.dtype, backend: str
) -> None:
    for case, spec, want in cases(layout, heads, dtype):
        assert_equal(case, backend, spec, want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("threads", [2, 4])
def test_lengths_around_the_split_into_parts(
    backend: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    part = torch_backend._MIN_PART
    edges = [n * part + d for n in (1, 2, 4) for d in (-1, 0, 1)]
    for length in (1, 2, *edges, 3 * part + 2):
        for heads in ((2, 1), (3, 3)):
            for window in (None, part + 44, 2 * part + 1):
                case = make_case([one_run(length)], [1], 1, heads)
                spec = LayerSpec(0.25, window)
                assert_equal(case, backend, spec, case.want(spec))
        even = [
            [(list(range(a, a + length)), list(range(length)))]
            for a in (0, length + 3, 2 * length + 6)
        ]
        for window in (None, part + 44):
            case = make_case(even, [1] * 3, 1, (2, 1))
            assert case.plan.stride == (0, length + 3)
            assert_equal(case, backend, LayerSpec(0.25, window), case.want(LayerSpec(0.25, window)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("queries", [1, 5])
def test_windows_that_just_bind(backend: str, queries: int) -> None:
    for layout in (one_run, many_short_runs):
        case = make_case([layout(40)], [queries], queries, (4, 2))
        for window in (1, queries, 38, 39, 40, 41):
            spec = LayerSpec(0.25, window)
            assert_equal(case, backend, spec, case.want(spec))


@pytest.mark.parametrize("backend", BACKENDS)
def test_even_rows_that_differ_in_what_they_show(backend: str) -> None:
    """Rows at even distances, but one brings nothing, or one hides keys, or they lie downwards."""
    even = [shifted(one_run(90), 100 * row) for row in range(3)]
    spec = LayerSpec(0.25)
    for rows, counts, hide in (
        (even, [1, 0, 1], 0.0),
        (even, [1, 1, 1], 0.5),
        (even[::-1], [1, 1, 1], 0.0),
        ([even[0], even[2], even[1]], [1, 1, 1], 0.0),
    ):
        case = make_case(rows, counts, 1, (4, 2), hide=hide)
        assert_equal(case, backend, spec, case.want(spec))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("queries", [1, 5])
def test_a_bias_finds_its_keys_in_a_model_without_windows(backend: str, queries: int) -> None:
    bias = causal_bias(1, 1, queries, 60)
    pages = permuted_image_pages(60)
    case = make_case([pages], [queries], queries, (4, 2), bias=bias, needs_order=False)
    assert_equal(case, backend, LayerSpec(0.25), case.want(LayerSpec(0.25)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_tiles_equal_one(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        dense,
        "query_tiles",
        lambda count, *_: [slice(i, min(i + 3, count)) for i in range(0, count, 3)],
    )
    for bias in (None, causal_bias(1, 1, 11, 60), causal_bias(1, 4, 11, 60)):
        for window, softcap in ((None, 5.0), (7, None), (7, 5.0)):
            case = make_case([many_short_runs(60)], [11], 11, (4, 2), bias=bias)
            spec = LayerSpec(0.25, None if bias is not None else window, softcap)
            assert_equal(case, backend, spec, case.want(spec))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (80, 80), (16, 24), (24, 8)])
def test_head_dims(backend: str, dims: tuple[int, int]) -> None:
    for queries in (1, 4):
        for rows in ([one_run(70)], [many_short_runs(70), shifted(long_and_short_runs(300), 200)]):
            case = make_case(rows, [queries] * len(rows), queries, (6, 2), dims)
            spec = LayerSpec(dims[0] ** -0.5)
            assert_equal(case, backend, spec, case.want(spec))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("queries", [1, 5])
def test_storage_offsets_and_strided_queries(backend: str, queries: int) -> None:
    case = make_case([one_run(600)], [queries], queries, (6, 3))
    spec = LayerSpec(0.25)
    want = case.want(spec)
    moved = []
    for tensor in (case.store.keys, case.store.values):
        room = torch.full((tensor.numel() + 29,), float("nan"))
        room[13 : 13 + tensor.numel()] = tensor.flatten()
        moved.append(room[13 : 13 + tensor.numel()].view_as(tensor))
    case.store = LayerStore(*moved)
    plain = case.query
    for query in (
        plain.transpose(1, 2).contiguous().transpose(1, 2),  # as models make it
        plain.transpose(2, 3).contiguous().transpose(2, 3),  # last stride is not 1
        torch.stack([plain, plain], -1)[..., 0],
        torch.cat([plain, plain], 3)[..., : plain.shape[3]],
    ):
        case.query = query
        assert_equal(case, backend, spec, want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 1), (2, 4)])
def test_bias_of_every_broadcast_shape(backend: str, shape: tuple[int, int]) -> None:
    rows = [one_run(40), shifted(many_short_runs(40), 60)]
    for counts in ([6, 6], [6, 4]):
        for softcap in (None, 5.0):
            case = make_case(rows, counts, 6, (4, 2), bias=causal_bias(*shape, 6, 40))
            spec = LayerSpec(0.25, softcap=softcap)
            assert_equal(case, backend, spec, case.want(spec))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("queries", [1, 5])
def test_a_query_that_sees_nothing_gets_zeros(
    backend: str, dtype: torch.dtype, queries: int
) -> None:
    for softcap in (None, 5.0):
        bias = causal_bias(1, 1, queries, 40)
        bias[..., queries // 2, :] = -math.inf
        case = make_case([one_run(40)], [queries], queries, (4, 2), bias=bias, dtype=dtype)
        spec = LayerSpec(0.25, softcap=softcap)
        assert not case.run(backend, spec)[:, queries // 2].any()
        assert_equal(case, backend, spec, case.want(spec))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("queries", [1, 5])
def test_huge_scores_stay_finite(backend: str, dtype: torch.dtype, queries: int) -> None:
    for layout in (one_run(600), many_short_runs(600), long_and_short_runs(600)):
        for window in (None, 100):
            case = make_case([layout], [queries], queries, (3, 1), dtype=dtype, scale=1e4)
            out = case.run(backend, LayerSpec(1.0, window))
            assert torch.isfinite(out).all()
            top = case.values[0].abs().max()
            assert out.abs().max() <= top * 1.01
            if dtype == torch.float32:
                want = case.want(LayerSpec(1.0, window))
                assert ((out - want).abs().amax(-1) < 1e-3).double().mean() > 0.9  # ties aside


class LargestTensor(TorchDispatchMode):
    """Remembers the largest new storage that any operation makes, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in given:
                    self.num_bytes = max(self.num_bytes, storage.nbytes())
        return out


@pytest.mark.parametrize("backend", ["sdpa", "torch"])
@pytest.mark.parametrize(
    ("window", "softcap", "dims"),
    [(None, None, (8, 8)), (64, None, (8, 8)), (None, 20.0, (8, 8)), (None, None, (8, 4))],
    ids=["plain", "window", "softcap", "other value dim"],
)
def test_a_chunk_makes_no_tensor_beyond_a_tile(
    backend: str, window: int | None, softcap: float | None, dims: tuple[int, int]
) -> None:
    """All scores of 8 heads x 512 queries x 8192 keys would take 128 MB in float32."""
    case = make_case([one_run(8192)], [512], 512, (8, 1), dims)
    with LargestTensor() as largest:
        case.run(backend, LayerSpec(0.25, window, softcap))
    assert largest.num_bytes <= 64 << 20


def test_the_largest_tensor_is_found() -> None:
    with LargestTensor() as largest:
        torch.zeros(10, 10).view(100)[:50].add(1.0)
    assert largest.num_bytes == 400


def test_a_decode_step_reads_the_pool_where_it_lies() -> None:
    even = [[(list(range(a, a + 900)), list(range(900)))] for a in (0, 1000)]
    for rows in (even, [one_run(900)], [[(list(range(900)), list(range(900)))]]):
        case = make_case(rows, [1] * len(rows), 1, (3, 1))
        with LargestTensor() as largest:
            case.run("torch", LayerSpec(0.25))
        assert largest.num_bytes < 900 * 16, "keys were copied"


def test_tiles_cover_all_queries_once() -> None:
    for queries, heads, keys in ((512, 16, 8192), (1, 9, 1), (7, 64, 1 << 20), (300, 1, 200_000)):
        tiles = list(query_tiles(queries, heads, keys))
        assert [i for tile in tiles for i in range(tile.start, tile.stop)] == list(range(queries))
        size = tiles[0].stop
        assert size == 1 or size * heads * keys * 4 <= 64 << 20
        assert len(tiles) == 1 or (size + 1) * heads * keys * 4 > 64 << 20


def test_segments_split_anywhere_hold_the_same_slots() -> None:
    runs = [(3, 4), (10, 12), (20, 200), (300, 310), (400, 528), (600, 727)]
    segments = segments_of(runs, torch.device("cpu"))
    slots = [slot for start, end in runs for slot in range(start, end)]
    assert [type(part) for part in segments] == [torch.Tensor, slice, slice, slice, slice]

    def listed(parts: Any) -> list[int]:
        lists = [
            list(range(p.start, p.stop)) if isinstance(p, slice) else p.tolist() for p in parts
        ]
        return sum(lists, [])

    assert listed(segments) == slots
    for count in range(-1, len(slots) + 2):
        head, tail = split_segments(segments, count)
        assert listed(head) == slots[: max(count, 0)]
        assert listed(tail) == slots[max(count, 0) :]
        assert all(listed([part]) for part in head + tail), "an empty segment"


def test_auto_is_resolved_for_the_device() -> None:
    assert resolve_backend("auto", "cpu") == create_backend("auto").name == "torch"
    assert resolve_backend("auto", "cuda") == resolve_backend("auto", torch.device("mps")) == "sdpa"
    for name in BACKENDS:
        assert resolve_backend(name, "cuda") == create_backend(name).name == name
    report = backend_report()
    assert [row[0] for row in report] == ["native", "reference", "sdpa", "torch"]
    assert all(ready or name == "native" for name, ready, _ in report)
    assert all(remark for *_, remark in report)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"backend: got 'torhc'; did you mean 'torch'\? Allowed: auto, native, ref",
    ):
        create_backend("torhc")


def test_a_backend_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    backend_type = type(create_backend("sdpa"))
    monkeypatch.setattr(backend_type, "unavailable_reason", lambda _: "no such kernel")
    with pytest.raises(
        BackendUnavailableError, match="'sdpa' cannot run here: no such kernel.*Allowed"
    ):
        create_backend("sdpa")
    assert ("sdpa", False, "no such kernel") in backend_report()
