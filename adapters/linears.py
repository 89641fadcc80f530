"""Linear layers of a bf16 model on a CPU, one token at a time: matrix-vector products.

For a single token torch sends a bf16 `F.linear` through oneDNN's matrix-matrix path; `torch.mv` reads the same
weights with a kernel made for one vector, accumulates in float32 too, and is faster (docs/decisions.md). Prompts
and batches keep `F.linear`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from oval_adapters.patch import Patch
from oval_core.errors import BackendUnavailableError

__all__ = ["patch_linears"]


def patch_linears(
    model: torch.nn.Module, decoder: torch.nn.Module, choice: str, is_active: Callable[[], bool]
) -> list[Patch]:
    """Gives the decoder's linear layers and the LM head a forward for single tokens.

    Args:
        model: the whole model; its output embeddings are patched too.
        decoder: the text decoder; a vision tower is left alone.
        choice: `auto` patches where it helps (bf16 on a CPU), `gemv` insists, `hf` never.
        is_active: whether the running forward uses an OVAL cache; all others stay as they are.
    Returns:
        The patches, to be undone in reverse order.
    Raises:
        BackendUnavailableError: `gemv` was asked for and the model is not bf16 on a CPU.
    """
    if choice == "hf":
        return []
    layers = {id(m): m for m in decoder.modules() if type(m) is torch.nn.Linear}
    head = model.get_output_embeddings()
    if type(head) is torch.nn.Linear:
        layers[id(head)] = head
    fitting = [m for m in layers.values() if _fits(m)]
    if choice == "gemv" and not fitting:
        found = sorted({f"{m.weight.dtype} on {m.weight.device.type}" for m in layers.values()})
        raise BackendUnavailableError(
            f"linears: gemv was asked for, got linear layers in {', '.join(found) or 'no plain nn.Linear'}. "
            "Allowed: torch.bfloat16 on cpu. Load the model so, or set linears to auto."
        )
    return [Patch(m, "forward", functools.partial(_single_token, m, is_active)) for m in fitting]


def _fits(module: torch.nn.Linear) -> bool:
    weight = module.weight
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.is_contiguous()
        and "forward"
        not in module.__dict__  # someone else's hook (accelerate, PEFT) stays in charge
    )


def _single_token(
    module: torch.nn.Linear,
    is_active: Callable[[], bool],
    original: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor], torch.Tensor]:
    in_features, out_features = module.in_features, module.out_features

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.numel() != in_features or x.requires_grad or not is_active():
            return original(x)
        out = torch.mv(module.weight, x.reshape(in_features))
        if module.bias is not None:
            out = out + module.bias
        return out.view(*x.shape[:-1], out_features)

    return forward
