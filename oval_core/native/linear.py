"""Loads the compiled linear layer for few rows, checks it once against torch, and calls it with tensors.

Shapes: M rows of input, O outputs, I inputs.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from oval_core.errors import BackendUnavailableError
from oval_core.native.build import build_library

PATHS = ("plain", "avx512_bf16", "amx")
"""Ways to compute it, slowest first, in the order of the C source."""

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64


class LinearKernel:
    """x @ weight.T + bias for few rows in bf16 on a CPU, float32 sums.

    A row's result has the same bits whatever other rows are computed with it.

    Attributes:
        path: one of `PATHS`.
        rows: numbers of rows for which it is faster than what torch does, and for one row than `Kernels.gemv`.
    """

    def __init__(self, path: str | None = None) -> None:
        """Takes the fastest path that this processor has, or the one that is named."""
        try:
            library = ctypes.CDLL(str(build_library("linear", {}, exact=True)))
        except OSError as error:
            raise BackendUnavailableError(
                f"the compiled linear layer cannot be loaded: {error}"
            ) from error
        best: int = library.oval_linear_path()
        self._path = best if path is None else PATHS.index(path)
        if self._path > best:
            raise BackendUnavailableError(f"this processor has no {path}, only {PATHS[best]}")
        self.path = PATHS[self._path]
        self._call = library.oval_linear
        self._call.argtypes = [*[_POINTER] * 4, *[_COUNT] * 3, ctypes.c_int, ctypes.c_int]
        least = 2 if self.path == "plain" else 1
        self.rows = range(least, library.oval_linear_limit(self._path) + 1)
        self._check()

    def __call__(
        self, weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns [..., O] for weight [O, I], x [..., I] and bias [O], all bf16, contiguous and not empty."""
        outputs, columns = weight.shape
        out = x.new_empty((*x.shape[:-1], outputs))
        if self._call(
            weight.data_ptr(), x.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
            x.numel() // columns, outputs, columns, self._path, torch.get_num_threads(),
        ):  # fmt: skip
            raise MemoryError("no memory for a linear layer's input")
        return out

    def _check(self) -> None:
        # As in `Kernels`: rows and columns that fill no tile, several tiles of rows, a bias.
        made = torch.Generator().manual_seed(0)
        shapes = ((70, 75), (19, 75), (70,))
        weight, x, bias = (torch.randn(s, generator=made).bfloat16() for s in shapes)
        want = x.float() @ weight.float().T + bias.float()
        together, alone = self(weight, x, bias), self(weight, x[17:18], bias)
        right = torch.allclose(together.float(), want, rtol=1e-2, atol=1e-2)
        if not right or not torch.equal(together[17:18], alone):
            raise BackendUnavailableError("the compiled linear layer failed its self-check")


@functools.cache
def load_linear() -> LinearKernel:
    """Returns the kernel on its fastest path, compiled when first asked for.

    Raises:
        BackendUnavailableError: it cannot be compiled, loaded or trusted here.
    """
    return LinearKernel()
