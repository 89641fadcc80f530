"""The compiled kernels: right at every shape, and honest about why they cannot run."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from oval_core.attention import create_backend, resolve_backend
from oval_core.errors import BackendUnavailableError
from oval_core.native import build, kernels
from oval_core.native.kernels import Kernels, load_kernels
from oval_core.routing.key_signals import Sketch
from oval_core.routing.sketch_kernel import sketch_scores

needs_compiler = pytest.mark.skipif(
    kernels.unavailable_reason() is not None, reason=f"{kernels.unavailable_reason()}"
)


@pytest.fixture
def fresh_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("OVAL_CACHE", str(tmp_path))
    for cached in (kernels.unavailable_reason, kernels.load_kernels):
        cached.cache_clear()
    yield tmp_path
    for cached in (kernels.unavailable_reason, kernels.load_kernels):
        cached.cache_clear()


def reference(query, keys, values, first, stride, length, scaling):
    rows = []
    for row in range(query.shape[0]):
        start = first + row * stride
        k = keys[:, start : start + length].double()
        v = values[:, start : start + length].double()
        q = query[row].double().view(keys.shape[0], -1, keys.shape[2])
        rows.append((torch.softmax(q @ k.transpose(1, 2) * scaling, -1) @ v).flatten(0, 1))
    return torch.stack(rows)[:, None]


@needs_compiler
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (8, 1, 80), (2, 2, 128)]
)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 255, 512, 1025])
def test_decode_equals_the_formula(heads: int, kv_heads: int, dim: int, length: int) -> None:
    slots = 2 * length + 40
    keys, values = (torch.randn(kv_heads, slots, dim).bfloat16() for _ in range(2))
    query = torch.randn(2, heads, 1, dim).bfloat16()
    args = (5, length + 7, length, 0.3)
    got = load_kernels(dim, heads // kv_heads).decode(query, keys, values, *args)
    want = reference(query, keys, values, *args)
    assert got.shape == (2, 1, heads, dim)
    torch.testing.assert_close(got.double(), want, rtol=8e-3, atol=2e-3)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_any_number_of_threads_and_parts(threads: int) -> None:
    keys, values = (torch.randn(3, 2100, 64).bfloat16() for _ in range(2))
    query = torch.randn(1, 9, 1, 64).bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = load_kernels(64, 3).decode(query, keys, values, 3, 0, 2049, 0.125)
    finally:
        torch.set_num_threads(before)
    want = reference(query, keys, values, 3, 0, 2049, 0.125)
    torch.testing.assert_close(got.double(), want, rtol=8e-3, atol=2e-3)


@needs_compiler
def test_extreme_scores_and_nan() -> None:
    keys, values = (torch.randn(2, 300, 64).bfloat16() for _ in range(2))
    query = (torch.randn(1, 2, 1, 64) * 1e4).bfloat16()
    got = load_kernels(64, 1).decode(query, keys, values, 0, 0, 300, 1.0)
    torch.testing.assert_close(
        got.double(), reference(query, keys, values, 0, 0, 300, 1.0), rtol=8e-3, atol=2e-3
    )
    query[0, 1] = float("nan")
    got = load_kernels(64, 1).decode(query, keys, values, 0, 0, 300, 1.0)
    assert got[0, 0, 0].isfinite().all()
    assert got[0, 0, 1].isnan().all()


@needs_compiler
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 5), (577, 576), (64, 1535), (1024, 3)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gemv_equals_linear(rows: int, columns: int, with_bias: bool) -> None:
    weight, x = torch.randn(rows, columns).bfloat16(), torch.randn(columns).bfloat16()
    bias = torch.randn(rows).bfloat16() if with_bias else None
    want = weight.double() @ x.double() + (0 if bias is None else bias.double())
    got = load_kernels(64, 1).gemv(weight, x, bias)
    torch.testing.assert_close(got.double(), want, rtol=8e-3, atol=1e-3)


@needs_compiler
def test_a_library_is_compiled_once_and_only_for_its_shape(fresh_cache: Path) -> None:
    first, again, other = (
        build.build_library("kernels", {"HEAD_DIM": dim, "GROUP": group})
        for dim, group in ((32, 2), (32, 2), (32, 4))
    )
    assert first == again != other
    made = sorted((fresh_cache / "kernels").iterdir())
    assert made == sorted([first, other]), "nothing else is left in the folder"
    assert stat.S_IMODE((fresh_cache / "kernels").stat().st_mode) == 0o700


@needs_compiler
def test_nothing_is_loaded_from_a_folder_that_others_can_write(fresh_cache: Path) -> None:
    (fresh_cache / "kernels").mkdir()
    os.chmod(fresh_cache / "kernels", 0o777)  # noqa: PTH101
    assert "writable by others" in kernels.unavailable_reason()
    with pytest.raises(BackendUnavailableError, match="writable by others"):
        create_backend("native")


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_working_compiler_auto_takes_torch_and_native_says_why(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    assert resolve_backend("auto", "cpu", torch.bfloat16) == "torch"
    with pytest.raises(BackendUnavailableError, match=compiler):
        create_backend("native", "cpu", torch.bfloat16)


@needs_compiler
def test_kernels_that_compute_wrongly_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernels, "gemv", lambda self, weight, x, bias: weight[:, 0] * 0)
    with pytest.raises(BackendUnavailableError, match="self-check"):
        Kernels(64, 1)


@needs_compiler
def test_loading_leaves_the_arithmetic_of_the_process_alone() -> None:
    """-ffast-math would flush subnormal numbers to zero, everywhere, from then on."""
    load_kernels(64, 1)
    assert 5e-324 * 1.0 > 0.0
    assert float(torch.tensor(1e-40) * 1.0) > 0.0


def test_auto_by_device_and_dtype() -> None:
    in_bf16 = "torch" if kernels.unavailable_reason() else "native"
    assert resolve_backend("auto", "cpu", torch.bfloat16) == in_bf16
    assert resolve_backend("auto", "cpu", torch.float32) == "torch"
    assert resolve_backend("auto", "cuda", torch.bfloat16) == "sdpa"


@needs_compiler
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (8, 1, 80)])
@pytest.mark.parametrize("sizes", [[1], [16] * 5, [16, 3, 32, 1, 7], [16] * 70 + [5]])
def test_pages_are_attended_and_measured_where_they_lie(
    heads: int, kv_heads: int, dim: int, sizes: list[int]
) -> None:
    torch.manual_seed(len(sizes))
    gaps = [3 * i for i in range(len(sizes))]  # no page follows the one before
    starts = [sum(sizes[:i]) + gap for i, gap in enumerate(gaps)]
    slots = sum(sizes) + 3 * len(sizes) + 2
    keys, values = (torch.randn(kv_heads, slots, dim).bfloat16() for _ in range(2))
    query = torch.randn(heads, 1, dim).bfloat16()
    (out, lse), page_lse = load_kernels(dim, heads // kv_heads).decode_pages(
        query, keys, values, torch.tensor(starts), torch.tensor(sizes), 0.3
    )
    index = torch.cat([torch.arange(a, a + n) for a, n in zip(starts, sizes, strict=True)])
    grouped = query.double().view(kv_heads, -1, dim)
    scores = (grouped @ keys[:, index].double().transpose(1, 2) * 0.3).flatten(0, 1)[:, None]
    by_page = torch.stack([part.logsumexp(-1) for part in scores.split(sizes, -1)], -1)
    wide = values[:, index].double().repeat_interleave(heads // kv_heads, 0)
    torch.testing.assert_close(page_lse.double(), by_page, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ wide, rtol=8e-3, atol=2e-3)


@needs_compiler
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (8, 1, 80)])
@pytest.mark.parametrize("most", [4, 16, 32])
def test_sketches_are_scored_as_torch_does(heads: int, kv_heads: int, dim: int, most: int) -> None:
    torch.manual_seed(most)
    signal = Sketch(0.2, most)
    summaries = torch.zeros(5, kv_heads, 13, 3 * dim + 2 * most + 2).bfloat16()
    for page in range(13):
        keys = torch.randn(5, kv_heads, 1 + page % most, dim)
        summaries[:, :, page] = signal.summarise(keys).bfloat16()
    query = torch.randn(5, heads, dim).bfloat16()
    shown = summaries[:, :, :11]  # room for more pages lies behind
    got = sketch_scores(signal, query, shown)
    assert got is not None
    torch.testing.assert_close(got, signal.score(query, shown).float(), rtol=2e-2, atol=5e-2)
    assert sketch_scores(signal, query, shown[:1]) is None, "several queries of one layer"
    with pytest.raises(AssertionError, match="one query a layer"):
        load_kernels(dim, heads // kv_heads).sketch_scores(query, shown[:1], 0.2, most)
