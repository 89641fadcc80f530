"""Loads the compiled kernels, checks them once against torch, and calls them with tensors.

Shapes: B rows, K KV heads, G query heads a KV head, H = K * G, S slots, D head dim.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from oval_core.attention.partial import Part, merge, num_parts
from oval_core.errors import BackendUnavailableError
from oval_core.native.build import build_library
from oval_core.native.linear import load_linear
from oval_core.native.tree import load_tree

_MIN_PART = 256
"""Keys of a part below which sharing out costs more than an idle core."""

_MIN_PAGES = 16
"""The same, in pages."""

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64


class Kernels:
    """The kernels for one head shape. bf16 on a CPU only.

    Attributes:
        head_dim: D.
        group: G.
        linear_path: how `linear` computes; see `LinearKernel.path`.
        linear_rows: numbers of rows for which `linear` is the fastest way.
        tree: attention of a few new tokens of a row; see `TreeKernel`.
    """

    def __init__(self, head_dim: int, group: int) -> None:
        self.head_dim = head_dim
        self.group = group
        try:
            self._library = ctypes.CDLL(
                str(build_library("kernels", {"HEAD_DIM": head_dim, "GROUP": group}))
            )
        except OSError as error:
            raise BackendUnavailableError(
                f"the compiled kernels cannot be loaded: {error}"
            ) from error
        self._decode, self._gemv = self._library.oval_decode, self._library.oval_gemv
        self._decode_part = self._library.oval_decode_part
        self._decode.argtypes = [
            *[_POINTER] * 4, *[_COUNT] * 5, ctypes.c_float, _COUNT, ctypes.c_int
        ]  # fmt: skip
        self._decode_part.argtypes = [
            *[_POINTER] * 5, *[_COUNT] * 4, ctypes.c_float, _COUNT, ctypes.c_int
        ]  # fmt: skip
        self._decode_pages = self._library.oval_decode_pages
        self._decode_pages.argtypes = [
            *[_POINTER] * 8, *[_COUNT] * 3, ctypes.c_float, _COUNT, ctypes.c_int
        ]  # fmt: skip
        self._sketch = self._library.oval_sketch
        self._sketch.argtypes = [*[_POINTER] * 3, *[_COUNT] * 5, ctypes.c_float, ctypes.c_int]
        self._sketch.restype = None
        self._gemv.argtypes = [*[_POINTER] * 4, _COUNT, _COUNT, ctypes.c_int]
        self._linear = load_linear()
        self.linear_path, self.linear_rows = self._linear.path, self._linear.rows
        self.tree = load_tree(head_dim)
        self._check()

    def decode(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        first: int,
        stride: int,
        length: int,
        scaling: float,
    ) -> torch.Tensor:
        """Attends with one query a row over keys [first + b * stride, ... + length) of the pool.

        Args:
            query: [B, H, 1, D] bf16.
            keys: pool [K, S, D] bf16, contiguous.
            values: pool [K, S, D] bf16, contiguous.
            first: slot of row 0's first key.
            stride: slots between rows.
            length: keys a row.
            scaling: factor on q.k.
        Returns:
            [B, 1, H, D] bf16.
        """
        batch, heads, _, dim = query.shape
        kv_heads, slots, _ = keys.shape
        query = query.contiguous()
        out = torch.empty(batch, 1, heads, dim, dtype=query.dtype)
        parts = num_parts(batch * kv_heads, length, _MIN_PART)
        offset = first * dim * query.element_size()
        failed = self._decode(
            query.data_ptr(), keys.data_ptr() + offset, values.data_ptr() + offset, out.data_ptr(),
            batch, kv_heads, length, stride * dim, slots * dim, scaling, parts, torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for the partial sums of a decode step")
        return out

    def decode_part(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> Part:
        """Attends with one query over some keys of a row.

        Args:
            query: [H, 1, D] bf16.
            keys: [K, L, D] bf16, views of any strides but the last, the same as those of values.
            values: [K, L, D] bf16.
            scaling: factor on q.k.
        Returns:
            Output [H, 1, D] and log-sum-exp [H, 1], float32.
        """
        heads, _, dim = query.shape
        kv_heads, length, _ = keys.shape
        assert keys.stride() == values.stride() and keys.stride(2) == 1, "strides"  # noqa: PT018
        query = query.contiguous()
        out = torch.empty(heads, 1, dim, dtype=torch.float32)
        lse = torch.empty(heads, 1, dtype=torch.float32)
        failed = self._decode_part(
            query.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(), lse.data_ptr(),
            kv_heads, length, keys.stride(0), keys.stride(1), scaling, num_parts(kv_heads, length, _MIN_PART),
            torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for the partial sums of a decode step")
        return out, lse

    def decode_pages(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        starts: torch.Tensor,
        counts: torch.Tensor,
        scaling: float,
    ) -> tuple[Part, torch.Tensor]:
        """Attends with one query over some pages, where they lie, and says what each of them gets.

        Args:
            query: [H, 1, D] bf16.
            keys: pool [K, S, D] bf16, contiguous.
            values: pool [K, S, D] bf16, contiguous.
            starts: int64 [P] first slot of each page.
            counts: int64 [P] slots of each, side by side, 1..64.
            scaling: factor on q.k.
        Returns:
            (output [H, 1, D], log-sum-exp [H, 1]), and the log-sum-exp of each page [H, 1, P]; float32.
        """
        heads, _, dim = query.shape
        kv_heads, slots, _ = keys.shape
        pages = len(starts)
        assert (heads, dim) == (kv_heads * self.group, self.head_dim), "kernels of another shape"
        query = query.contiguous()
        out = torch.empty(heads, 1, dim, dtype=torch.float32)
        lse = torch.empty(heads, 1, dtype=torch.float32)
        page_lse = torch.empty(heads, 1, pages, dtype=torch.float32)
        failed = self._decode_pages(
            query.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(), lse.data_ptr(),
            page_lse.data_ptr(), starts.data_ptr(), counts.data_ptr(), pages, kv_heads, slots * dim, scaling,
            num_parts(kv_heads, pages, _MIN_PAGES), torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for the partial sums of a decode step")
        return (out, lse), page_lse

    def sketch_scores(
        self, query: torch.Tensor, sketches: torch.Tensor, scaling: float, most_tokens: int
    ) -> torch.Tensor:
        """Returns scores [Y, H, P], float32, of queries [Y, H, D] against page sketches [Y, K, P, E], both bf16.

        Args:
            query: one a layer.
            sketches: `Sketch` summaries, pages side by side; layers and KV heads may have room between them.
            scaling: factor on q.k.
            most_tokens: as in `Sketch`.
        """
        layers, heads, _ = query.shape
        _, kv_heads, pages, width = sketches.shape
        assert len(sketches) == layers, "one query a layer"
        assert heads == kv_heads * self.group, "kernels of another head shape"
        assert width == 3 * self.head_dim + 2 * most_tokens + 2, "sketches of another shape"
        assert sketches.stride(2) == width
        assert sketches.stride(0) == kv_heads * sketches.stride(1)
        out = torch.empty(layers, heads, pages, dtype=torch.float32)
        query = query.contiguous()
        self._sketch(
            query.data_ptr(), sketches.data_ptr(), out.data_ptr(), layers * kv_heads, pages, sketches.stride(1), width,
            most_tokens, scaling, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def gemv(
        self, weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns weight [O, I] @ x [..., I] (+ bias [O]) as [..., O]; one row, bf16 and contiguous, float32 sums."""
        rows, columns = weight.shape
        out = x.new_empty((*x.shape[:-1], rows))
        bias_pointer = 0 if bias is None else bias.data_ptr()
        if self._gemv(
            weight.data_ptr(), x.data_ptr(), bias_pointer, out.data_ptr(), rows, columns, torch.get_num_threads()
        ):  # fmt: skip
            raise MemoryError("no memory for a linear layer's input")
        return out

    def linear(
        self, weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns weight [O, I] @ each row of x [..., I] (+ bias [O]) as [..., O]; see `LinearKernel`."""
        return self._linear(weight, x, bias)

    def _check(self) -> None:
        # A compiler that miscompiles, or a library of another machine, must not cost anyone a wrong token.
        made = torch.Generator().manual_seed(0)
        shape = (2, 300, self.head_dim)
        keys, values = (torch.randn(shape, generator=made).bfloat16() for _ in range(2))
        query = torch.randn(1, 2 * self.group, 1, self.head_dim, generator=made).bfloat16()
        got = self.decode(query, keys, values, 7, 0, 290, 0.5 * self.head_dim**-0.5)
        wide = query.float().view(2, self.group, self.head_dim)
        scores = wide @ keys[:, 7:297].float().transpose(1, 2) * (0.5 * self.head_dim**-0.5)
        want = (torch.softmax(scores, -1) @ values[:, 7:297].float()).flatten()
        halves = [slice(7, 100), slice(100, 297)]
        parts = [
            self.decode_part(query[0], keys[:, at], values[:, at], 0.5 * self.head_dim**-0.5)
            for at in halves
        ]
        x = query.flatten()[: self.head_dim]
        product = self.gemv(keys[0], x, None).float()
        right = torch.allclose(got.float().flatten(), want, rtol=1e-2, atol=1e-3)
        right &= torch.allclose(merge(parts).flatten(), want, rtol=1e-2, atol=1e-3)
        right &= torch.allclose(product, keys[0].float() @ x.float(), rtol=1e-2, atol=1e-2)
        right &= self._reads_pages(query[0], keys, values, scores[..., :288], want)
        if not right:
            raise BackendUnavailableError("the compiled kernels failed their self-check")

    def _reads_pages(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scores: torch.Tensor,
        want: torch.Tensor,
    ) -> bool:
        # slots 7..296 as 18 pages of 16 and one of 2, in two calls
        starts, counts = 7 + 16 * torch.arange(19), torch.tensor([16] * 18 + [2])
        scaling = 0.5 * self.head_dim**-0.5
        paged = [
            self.decode_pages(query, keys, values, starts[at], counts[at], scaling)
            for at in (slice(0, 18), slice(18, 19))
        ]
        by_page = scores.reshape(*scores.shape[:-1], 18, 16).logsumexp(-1).view(-1, 1, 18)
        right = torch.allclose(merge([part for part, _ in paged]).flatten(), want, 1e-2, 1e-3)
        return right and torch.allclose(paged[0][1], by_page, 1e-2, 1e-2)


@functools.cache
def load_kernels(head_dim: int, group: int) -> Kernels:
    """Returns the kernels for a head shape, compiled when first asked for.

    Raises:
        BackendUnavailableError: they cannot be compiled, loaded or trusted here.
    """
    return Kernels(head_dim, group)


@functools.lru_cache(maxsize=1)
def unavailable_reason() -> str | None:
    """Returns why kernels cannot be compiled here, or None."""
    try:
        load_kernels(64, 1)
    except BackendUnavailableError as error:
        return str(error)
    return None
