"""A linear layer for few rows: the kernel where it fits, torch elsewhere."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from oval_core.native import few_rows
from oval_core.native.few_rows import few_rows_linear
from oval_core.native.linear import load_linear


@pytest.mark.parametrize("rows", [1, 2, 7, 31, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_a_linear_layer(rows: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, 3, 96).to(dtype), torch.randn(40, 96).to(dtype)
    bias = torch.randn(40).to(dtype)
    with torch.no_grad():
        torch.testing.assert_close(
            few_rows_linear(x.transpose(0, 1), weight, bias),
            F.linear(x.transpose(0, 1), weight, bias),
            rtol=2e-2,
            atol=2e-2,
        )
        torch.testing.assert_close(few_rows_linear(x, weight), F.linear(x, weight), rtol=2e-2, atol=5e-2)  # fmt: skip


def test_it_learns() -> None:
    x, weight = torch.randn(4, 32).bfloat16(), torch.randn(8, 32).bfloat16().requires_grad_()
    few_rows_linear(x, weight).sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad[0], x.sum(0))


def test_nothing_and_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(8, 32).bfloat16()
    with torch.no_grad():
        assert few_rows_linear(torch.empty(0, 32).bfloat16(), weight).shape == (0, 8)
        monkeypatch.setattr(few_rows, "_kernel", lambda: None)
        x = torch.randn(4, 32).bfloat16()
        assert torch.equal(few_rows_linear(x, weight), F.linear(x, weight))


def test_the_kernel_is_used_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = load_linear()
    if 4 not in kernel.rows:
        pytest.skip("torch is as fast on this processor")
    asked = []
    monkeypatch.setattr(few_rows, "_kernel", lambda: asked.append(1) or kernel)
    with torch.no_grad():
        few_rows_linear(torch.randn(4, 32).bfloat16(), torch.randn(8, 32).bfloat16())
        few_rows_linear(torch.randn(4, 32), torch.randn(8, 32))
    assert asked == [1]
