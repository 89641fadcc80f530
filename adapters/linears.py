"""Linear layers of a bf16 model on a CPU, for one token or a few: what costs is reading the weights.

torch sends a bf16 `F.linear` of few rows through oneDNN's matrix-matrix path. `gemv` (torch.mv, a single row) and
`native` (C, up to some tens of rows: a batch, or a draft that is verified) read the same weights faster and sum in
float32 too (docs/decisions.md). Prompts keep `F.linear`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from oval_adapters.patch import Patch
from oval_core.errors import BackendUnavailableError
from oval_core.native import load_kernels, unavailable_reason

__all__ = ["patch_linears"]

_Product: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def patch_linears(
    model: torch.nn.Module, decoder: torch.nn.Module, choice: str, is_active: Callable[[], bool]
) -> tuple[str, list[Patch]]:
    """Gives the decoder's linear layers and the LM head a forward for few tokens.

    Args:
        model: the whole model; its output embeddings are patched too.
        decoder: the text decoder; a vision tower is left alone.
        choice: as `OvalConfig.linears`.
        is_active: whether the running forward uses an OVAL cache; all others stay as they are.
    Returns:
        What the choice was resolved to, and the patches, to be undone in reverse order.
    Raises:
        BackendUnavailableError: `gemv` or `native` was asked for and cannot run here.
    """
    layers = {id(m): m for m in decoder.modules() if type(m) is torch.nn.Linear}
    head = model.get_output_embeddings()
    if type(head) is torch.nn.Linear:
        layers[id(head)] = head
    fitting = [] if choice == "hf" else [m for m in layers.values() if _fits(m)]
    if choice in ("gemv", "native") and not fitting:
        found = sorted({f"{m.weight.dtype} on {m.weight.device.type}" for m in layers.values()})
        raise BackendUnavailableError(
            f"linears: {choice} was asked for, got linear layers in {', '.join(found) or 'no nn.Linear'}. "
            "Allowed: torch.bfloat16 on cpu. Load the model so, or set linears to auto."
        )
    if not fitting:
        return "hf", []
    name = _resolve(choice)
    wrap = functools.partial(_few_tokens, is_active, _products(name))
    return name, [Patch(m, "forward", functools.partial(wrap, m)) for m in fitting]


def _resolve(choice: str) -> str:
    if choice == "gemv":
        return choice
    reason = unavailable_reason()
    if reason is None:
        return "native"
    if choice == "native":
        raise BackendUnavailableError(
            f"linears: native cannot run here: {reason}. Allowed: auto, gemv or hf. Choose one of them."
        )
    return "gemv"


def _products(name: str) -> Sequence[_Product | None]:
    # by number of rows; None: torch's own
    if name == "gemv":
        return None, _torch_gemv
    kernels = load_kernels(64, 1)
    found: list[_Product | None] = [None, kernels.gemv]
    found += [None] * (max(kernels.linear_rows, default=1) - 1)
    for rows in kernels.linear_rows:
        found[rows] = kernels.linear
    return tuple(found)


def _fits(module: torch.nn.Linear) -> bool:
    weight = module.weight
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.is_contiguous()
        and weight.numel() > 0
        and "forward"
        not in module.__dict__  # someone else's hook (accelerate, PEFT) stays in charge
    )


def _torch_gemv(weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = torch.mv(weight, x.view(-1)).view(*x.shape[:-1], -1)
    return out if bias is None else out + bias


def _few_tokens(
    is_active: Callable[[], bool],
    products: Sequence[_Product | None],
    module: torch.nn.Linear,
    original: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor], torch.Tensor]:
    in_features, parameters = module.in_features, module._parameters
    too_many = len(products)

    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // in_features
        product = products[rows] if rows < too_many else None
        if product is None or x.shape[-1:] != (in_features,) or not is_active():
            return original(x)
        weight = parameters["weight"]
        # The model may have been moved since attach: a kernel must never be handed another device's memory.
        fits = x.dtype is weight.dtype is torch.bfloat16 and x.is_cpu and weight.is_cpu
        if not fits or not x.is_contiguous() or not weight.is_contiguous():
            return original(x)
        # The LM head may be called again after a forward, in training.
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            return original(x)
        return product(weight, x, parameters["bias"])

    return forward
