"""Which way a linear layer of an attached model takes, by rows, dtype and cache."""

from __future__ import annotations

import pytest
import torch
from tiny_models import build, one_thread, prompt
from transformers import PreTrainedModel

from oval_adapters import attach
from oval_adapters.linears import patch_linears
from oval_core.native import Kernels, load_kernels, unavailable_reason

_one_thread = pytest.fixture(autouse=True)(one_thread)
needs_compiler = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"{unavailable_reason()}"
)


@pytest.fixture
def model() -> PreTrainedModel:
    return build("llama").to(torch.bfloat16)


@pytest.fixture
def rows_seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(kernel, rows) of every call."""
    seen: list[tuple[str, int]] = []
    for name, original in (("gemv", Kernels.gemv), ("linear", Kernels.linear)):

        def call(self, weight, x, bias, name=name, original=original):
            seen.append((name, x.numel() // weight.shape[1]))
            return original(self, weight, x, bias)

        monkeypatch.setattr(Kernels, name, call)
    return seen


@needs_compiler
@pytest.mark.parametrize("rows", [1, 2, 16, 32, 64, 65])
def test_few_rows_take_the_kernel_and_many_do_not(
    model: PreTrainedModel, rows_seen: list[tuple[str, int]], rows: int
) -> None:
    few = load_kernels(64, 1).linear_rows
    ids = prompt(rows)
    want = model(ids).logits
    # torch's attention: where linear layers stay as they are, it equals Hugging Face's bit for bit
    with attach(model, {"backend": "torch"}) as oval, torch.no_grad():
        model(prompt(1), cache=oval.new_cache())
        rows_seen.clear()  # kernels of a new head shape check themselves
        got = model(ids, cache=oval.new_cache()).logits
    ours = "linear" if rows in few else "gemv" if rows == 1 else None
    assert set(rows_seen) == ({(ours, rows)} if ours else set())
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.15)


@needs_compiler
@pytest.mark.parametrize("choice", ["gemv", "hf"])
def test_other_choices_keep_the_kernel_out(
    model: PreTrainedModel, rows_seen: list[tuple[str, int]], choice: str
) -> None:
    with attach(model, {"linears": choice}) as oval, torch.no_grad():
        model(prompt(1), cache=oval.new_cache())
        rows_seen.clear()  # kernels of a new head shape check themselves
        model(prompt(4), cache=oval.new_cache())
        assert oval.linears == choice
    assert rows_seen == []


@needs_compiler
def test_a_forward_on_another_cache_is_left_alone(
    model: PreTrainedModel, rows_seen: list[tuple[str, int]]
) -> None:
    with attach(model), torch.no_grad():
        model(prompt(4), use_cache=True)
        model(prompt(4), use_cache=False)
    assert rows_seen == []


def lone(active: bool = True) -> tuple[torch.nn.Module, torch.nn.Linear]:
    """A patched layer without a model around it."""

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(48, 40).bfloat16()

        def get_output_embeddings(self) -> torch.nn.Module:
            return self.layer

    holder = Holder()
    patch_linears(holder, holder, "native", lambda: active)
    return holder, holder.layer


@needs_compiler
@pytest.mark.parametrize("rows", [1, 3])
def test_what_the_kernel_may_not_be_handed_goes_to_torch(
    rows_seen: list[tuple[str, int]], rows: int
) -> None:
    _, layer = lone()
    x = torch.randn(rows, 48).bfloat16()
    with torch.no_grad():
        got = layer(x)
        assert len(rows_seen) == 1
        layer(torch.randn(48, 2 * rows + 2).bfloat16().T[: rows + 1])  # not contiguous
        with pytest.raises(RuntimeError):
            layer(torch.randn(48, rows).bfloat16())  # as many numbers, another shape
        with pytest.raises(RuntimeError):
            layer(x.float())
        assert layer(x[:0]).shape == (0, 40)
    torch.testing.assert_close(layer(x), got, rtol=0.02, atol=0.02)
    layer(x).float().sum().backward()  # gradients on
    assert layer.weight.grad is not None
    layer.weight.data = layer.weight.data.float()
    layer.bias.data = layer.bias.data.float()
    assert layer(x.float()).dtype == torch.float32
    assert len(rows_seen) == 1


@needs_compiler
def test_a_row_does_not_depend_on_the_tokens_beside_it() -> None:
    _, layer = lone()
    few = load_kernels(64, 1).linear_rows
    x = torch.randn(1, max(few), 48).bfloat16()
    with torch.no_grad():
        together = layer(x)
        for row in range(0, max(few), 7):
            around = x[:, row : row + few.start]
            assert torch.equal(layer(around)[:, 0], together[:, row])
