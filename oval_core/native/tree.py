"""Loads the compiled attention of a few new tokens, checks it once against torch, and calls it with tensors.

Shapes: H heads, K KV heads, G = H / K, N new tokens, S slots, L keys, D head dim.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

from oval_core.errors import BackendUnavailableError
from oval_core.native.build import build_library
from oval_core.native.linear import PATHS

MOST_NEW = 64
"""New tokens beyond which the kernel is not made for."""

_MIN_WORK = 1 << 14
"""Scores of a thread below which starting it costs more than it gives."""

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64


class TreeKernel:
    """Attention of 1..`MOST_NEW` new tokens of a row, bf16 on a CPU, float32 sums.

    The bits of a token's result depend on its query, on the older keys and on the new keys that it sees, in their order:
    not on the other queries, nor on its place among them, nor on the number of threads.

    Attributes:
        head_dim: D.
        path: one of `PATHS`.
        counts: numbers of new tokens for which it is faster than what torch does.
    """

    def __init__(self, head_dim: int, path: str | None = None) -> None:
        """Takes the fastest path that this processor has, or the one that is named."""
        self.head_dim = head_dim
        try:
            library = ctypes.CDLL(str(build_library("tree", {"HEAD_DIM": head_dim}, exact=True)))
        except OSError as error:
            raise BackendUnavailableError(
                f"the compiled attention of trees cannot be loaded: {error}"
            ) from error
        best: int = library.oval_tree_path()
        self._path = best if path is None else PATHS.index(path)
        if self._path > best:
            raise BackendUnavailableError(f"this processor has no {path}, only {PATHS[best]}")
        self.path = PATHS[self._path]
        # measured: plain C is right everywhere, and slower than torch's own kernel
        self.counts = range(1, 1 if self.path == "plain" else MOST_NEW + 1)
        self._call = library.oval_tree
        self._call.argtypes = [
            *[_POINTER] * 6, *[_COUNT] * 7, ctypes.c_float, ctypes.c_int, ctypes.c_int
        ]  # fmt: skip
        self._check()

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        segments: Sequence[slice | torch.Tensor],
        seen: torch.Tensor | None,
        scaling: float,
    ) -> torch.Tensor:
        """Attends with the new tokens of one row.

        Args:
            query: [H, N, D] bf16, views of any strides.
            keys: pool [K, S, D] bf16, contiguous.
            values: pool [K, S, D] bf16, contiguous.
            segments: where the keys of the row lie, those of the new tokens last.
            seen: bool [N, N] which new tokens each one sees; None when causal.
            scaling: factor on q.k, above 0.
        Returns:
            [N, H, D] bf16; zeros for a token that sees nothing.
        """
        heads, count, dim = query.shape
        kv_heads, slots, _ = keys.shape
        assert dim == self.head_dim == keys.shape[2], "a kernel of another shape"
        assert keys.shape == values.shape and heads % kv_heads == 0, "shapes"  # noqa: PT018
        if query.stride(2) != 1:
            query = query.contiguous()
        held = [part if isinstance(part, slice) else part.contiguous() for part in segments]
        places, length = _places(held)
        assert 0 < count <= min(MOST_NEW, length), "number of new tokens"
        mask = None if seen is None else seen.contiguous()
        out = torch.empty(count, heads, dim, dtype=query.dtype)
        threads = min(torch.get_num_threads(), max(1, heads * count * length // _MIN_WORK))
        if self._call(
            query.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(), places,
            0 if mask is None else mask.data_ptr(), len(held), count, kv_heads, heads // kv_heads, slots * dim,
            query.stride(0), query.stride(1), scaling, self._path, threads,
        ):  # fmt: skip
            raise MemoryError("no memory for the partial sums of a forward")
        return out

    def _check(self) -> None:
        # As in `Kernels`: a scattered and an even segment, several tiles of queries, keys that fill no tile.
        made = torch.Generator().manual_seed(0)
        shapes = ((6, 11, self.head_dim), (2, 400, self.head_dim), (2, 400, self.head_dim))
        query, keys, values = (torch.randn(s, generator=made).bfloat16() for s in shapes)
        order = torch.randperm(90, generator=made)
        seen = torch.rand(11, 11, generator=made).tril() > 0.3
        seen.fill_diagonal_(True)
        scaling = self.head_dim**-0.5
        index = torch.cat([torch.arange(97, 391), order])
        got = self(query, keys, values, (slice(97, 391), order), seen, scaling)
        wide = [t[:, index].float().repeat_interleave(3, 0) for t in (keys, values)]
        scores = query.float() @ wide[0].transpose(1, 2) * scaling
        scores[:, :, -11:].masked_fill_(~seen, float("-inf"))
        want = (torch.softmax(scores, -1) @ wide[1]).transpose(0, 1)
        if not torch.allclose(got.float(), want, rtol=1e-2, atol=4e-3):
            raise BackendUnavailableError("the compiled attention of trees failed its self-check")


def _places(segments: Sequence[slice | torch.Tensor]) -> tuple[ctypes.Array[ctypes.c_int64], int]:
    """Returns segments as C reads them, and how many keys they hold."""
    numbers, length = [], 0
    for part in segments:
        if isinstance(part, slice):
            size = part.stop - part.start
            numbers += [part.start, size, 0]
        else:
            size = part.shape[0]
            numbers += [0, size, part.data_ptr()]
        length += size
    return (_COUNT * len(numbers))(*numbers), length


@functools.cache
def load_tree(head_dim: int) -> TreeKernel:
    """Returns the kernel for a head dim on its fastest path, compiled when first asked for.

    Raises:
        BackendUnavailableError: it cannot be compiled, loaded or trusted here.
    """
    return TreeKernel(head_dim)
