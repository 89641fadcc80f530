"""The compiled linear layer: right at every shape on every path, and the same bits whatever a row's neighbours are."""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from oval_core.errors import BackendUnavailableError
from oval_core.native import build, kernels, linear
from oval_core.native.chunk_io import load_library
from oval_core.native.linear import PATHS, LinearKernel

needs_compiler = pytest.mark.skipif(
    kernels.unavailable_reason() is not None, reason=f"{kernels.unavailable_reason()}"
)
each_path = pytest.mark.parametrize("path", PATHS)
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@functools.cache
def on(path: str) -> LinearKernel:
    """The kernel on one path; skips where the processor lacks it."""
    try:
        return LinearKernel(path)
    except BackendUnavailableError as error:
        pytest.skip(str(error))


def made(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def check(kernel: Kernel, weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
    got = kernel(weight, x, bias)
    want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert got.shape == want.shape
    assert got.dtype == torch.bfloat16
    # float32 sums: off by a rounding to bf16, and by the sum's own errors where terms cancel
    slack = 1e-6 * (x.double().abs() @ weight.double().abs().T) + 1e-30
    excess = (got.double() - want).abs() - 2**-8 * want.abs() - slack
    assert excess.max() <= 0, f"{excess.max()} beyond the bound"


@needs_compiler
@each_path
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 70), st.integers(1, 130), st.integers(1, 200), st.booleans(), st.integers(0, 99)
)
def test_equals_the_formula(
    path: str, rows: int, outputs: int, columns: int, with_bias: bool, seed: int
) -> None:
    weight, x = made(outputs, columns, seed=seed), made(rows, columns, seed=seed + 1)
    check(on(path), weight, x, made(outputs, seed=seed + 2) if with_bias else None)


@needs_compiler
@each_path
@pytest.mark.parametrize(
    ("rows", "outputs", "columns"),
    [(16, 576, 576), (5, 192, 576), (33, 576, 1536), (64, 999, 1535), (2, 33, 3000)],
)
def test_at_the_sizes_of_models(path: str, rows: int, outputs: int, columns: int) -> None:
    check(on(path), made(outputs, columns), made(1, rows, columns, seed=1), made(outputs, seed=2))


@needs_compiler
@each_path
@pytest.mark.parametrize(("outputs", "columns"), [(64, 96), (577, 1535), (17, 7), (192, 576)])
def test_a_row_has_the_same_bits_in_every_batch_and_place(
    path: str, outputs: int, columns: int
) -> None:
    """Trees of drafts and batches are reproducible only so."""
    weight, bias, x = made(outputs, columns), made(outputs, seed=1), made(64, columns, seed=2)
    for threads in (1, 3):
        with use_threads(threads):
            alone = torch.cat([on(path)(weight, x[m : m + 1], bias) for m in range(64)])
            for rows in (2, 3, 4, 5, 8, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64):
                assert torch.equal(on(path)(weight, x[:rows], bias), alone[:rows]), rows
                assert torch.equal(on(path)(weight, x[-rows:], bias), alone[-rows:]), rows
            order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
            assert torch.equal(on(path)(weight, x[order], bias), alone[order])


class use_threads:  # noqa: N801 - reads as a statement
    """Sets torch's number of threads for a while."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def __enter__(self) -> None:
        self.before = torch.get_num_threads()
        torch.set_num_threads(self.threads)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self.before)


@needs_compiler
@each_path
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_any_number_of_threads(path: str, threads: int) -> None:
    weight, x, bias = made(333, 250), made(9, 250, seed=1), made(333, seed=2)
    one = on(path)(weight, x, bias)
    with use_threads(threads):
        check(on(path), weight, x, bias)
        assert torch.equal(on(path)(weight, x, bias), one)


@needs_compiler
@each_path
@pytest.mark.parametrize("offset", [1, 3, 16, 31])
def test_tensors_that_begin_anywhere_among_others(path: str, offset: int) -> None:
    """What lies around in memory is NaN: none of it may get into a sum."""
    rows, outputs, columns = 5, 35, 45

    def inside(*shape: int, seed: int) -> torch.Tensor:
        size = math.prod(shape)
        store = torch.full((offset + size + 64,), float("nan")).bfloat16()
        store[offset : offset + size] = made(size, seed=seed)
        return store[offset : offset + size].view(shape)

    weight, x = inside(outputs, columns, seed=0), inside(rows, columns, seed=1)
    assert weight.data_ptr() % 64 == (2 * offset + weight.untyped_storage().data_ptr()) % 64
    check(on(path), weight, x, inside(outputs, seed=2))


@needs_compiler
@each_path
def test_infinity_and_nan_stay_in_their_row_and_output(path: str) -> None:
    weight, x = made(40, 70), made(20, 70, seed=1)
    clean = on(path)(weight, x, None)
    x[3, 5], x[17, 69] = float("nan"), float("inf")
    weight[33, 2] = float("-inf")
    got = on(path)(weight, x, None)
    assert got[3].isnan().all()
    assert got[17].isinf()[:33].all()
    others = torch.tensor([m for m in range(20) if m not in (3, 17)])
    assert (got[others, 33] == -float("inf") * x[others, 2].sign()).all()
    kept = torch.tensor([o for o in range(40) if o != 33])
    assert torch.equal(got[others][:, kept], clean[others][:, kept])


@needs_compiler
@each_path
def test_large_sums_become_infinite_and_ties_round_to_even(path: str) -> None:
    huge = torch.full((2, 64), 3e38).bfloat16()
    assert on(path)(torch.ones(3, 64).bfloat16(), huge, None).isinf().all()
    # 1 + 2**-8 lies between two bf16 numbers, 1 + 3 * 2**-8 too: to even is down, then up
    weight = torch.tensor([[1.0, 1.0], [1.0, 3.0]]).bfloat16()
    x = torch.tensor([[1.0, 2**-8]] * 3).bfloat16()
    want = torch.tensor([[1.0, 1.0 + 2**-6]] * 3).bfloat16()
    assert torch.equal(on(path)(weight, x, None), want)


@needs_compiler
@each_path
def test_between_the_products_of_torch(path: str) -> None:
    """torch uses tiles in the same threads: neither may find the other's setting."""
    weight, x = made(256, 512), made(64, 512, seed=1)
    query = made(1, 4, 300, 64, seed=3)
    forms = {
        "linear": lambda: F.linear(x, weight),
        "matmul": lambda: x @ weight.T,
        "attention": lambda: F.scaled_dot_product_attention(query, query, query),
        "small": lambda: F.linear(x[:3, :37], weight[:5, :37]),
    }
    alone = {name: form() for name, form in forms.items()}
    ours = on(path)(weight, x, None)
    for threads in (1, 2):
        with use_threads(threads):
            for name, form in forms.items():
                before = form()
                assert torch.equal(on(path)(weight, x, None), ours)
                assert torch.equal(form(), before), name
                torch.testing.assert_close(before, alone[name], rtol=2e-2, atol=2e-2)


@needs_compiler
@each_path
def test_from_several_python_threads_at_once(path: str) -> None:
    kernel = on(path)
    weight = made(200, 300)
    inputs = [made(1 + seed % 20, 300, seed=seed) for seed in range(40)]
    want = [kernel(weight, x, None) for x in inputs]

    def turn(index: int) -> torch.Tensor:
        F.linear(inputs[index], weight)
        return kernel(weight, inputs[index], None)

    with ThreadPoolExecutor(8) as pool:
        for got, expected in zip(pool.map(turn, range(40)), want, strict=True):
            assert torch.equal(got, expected)


@needs_compiler
@each_path
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_in_a_forked_process(path: str) -> None:
    weight, x = made(64, 64), made(4, 64, seed=1)
    with use_threads(1):  # OpenMP's own threads do not survive a fork
        kernel = on(path)
        want = kernel(weight, x, None)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(kernel(weight, x, None), want) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@needs_compiler
def test_the_best_path_is_taken_and_a_missing_one_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    best = linear.load_linear().path
    assert kernels.load_kernels(64, 1).linear_path == best
    assert LinearKernel("plain").rows.start == 2, "one row is faster by gemv"

    class Lesser:
        """The library on a machine that allows less."""

        def __init__(self, name: str, load: type[ctypes.CDLL] = ctypes.CDLL) -> None:
            library = load(name)
            self.oval_linear, self.oval_linear_limit = (
                library.oval_linear,
                library.oval_linear_limit,
            )

        def oval_linear_path(self) -> int:
            return 0

    monkeypatch.setattr(linear.ctypes, "CDLL", Lesser)
    assert LinearKernel().path == "plain"
    with pytest.raises(BackendUnavailableError, match="no amx, only plain"):
        LinearKernel("amx")


@needs_compiler
def test_a_kernel_that_computes_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        LinearKernel, "__call__", lambda self, weight, x, bias: (x @ weight.T + bias) * 0
    )
    with pytest.raises(BackendUnavailableError, match="self-check"):
        LinearKernel()


@needs_compiler
def test_every_source_belongs_to_this_version() -> None:
    """Other kernels have ways around a library that is missing, and would hide it."""
    sources = resources.files("oval_core.native").iterdir()
    names = sorted(Path(source.name).stem for source in sources if source.name.endswith(".c"))
    assert names == ["chunks", "kernels", "linear", "tree"]
    assert all(build.build_library(name, {}).is_file() for name in names)
    assert load_library() is not None
