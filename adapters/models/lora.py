"""Low-rank additions to linear layers (LoRA): put on for training, merged into the weights for use. r rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from oval_core.errors import ConfigError

__all__ = ["TARGETS", "LoraLinear", "add_lora", "lora_tensors", "merge_lora"]

TARGETS = ("q_proj", "v_proj", "up_proj", "down_proj")
"""Linear layers that get an addition, by the last part of their names."""


class LoraLinear(nn.Module):
    """A frozen linear layer with a trained addition: base(x) + scale * b(a(x)); it begins as the layer alone.

    Args:
        base: the layer.
        rank: r.
        scale: of the addition.
        generator: of the first values of `a`.
    """

    def __init__(
        self, base: nn.Linear, rank: int, scale: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = scale
        first = torch.randn(rank, base.in_features, generator=generator) * base.in_features**-0.5
        self.a = nn.Parameter(first)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [..., out] from [..., in]."""
        added = F.linear(F.linear(x, self.a.to(x.dtype)), (self.scale * self.b).to(x.dtype))
        y: torch.Tensor = self.base(x)
        return y + added


def add_lora(
    decoder: nn.Module, rank: int, scale: float, seed: int, targets: Sequence[str] = TARGETS
) -> dict[str, LoraLinear]:
    """Replaces linear layers of a decoder in place; returns the new ones by their names in it.

    Args:
        decoder: all its parameters are frozen.
        rank: r.
        scale: of the additions.
        seed: of their first values.
        targets: last parts of names.
    """
    decoder.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    found = {
        name: module
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets
    }
    added = {}
    for name, module in found.items():
        parent, _, own = name.rpartition(".")
        added[name] = LoraLinear(module, rank, scale, generator)
        setattr(decoder.get_submodule(parent), own, added[name])
    return added


def lora_tensors(added: Mapping[str, LoraLinear]) -> dict[str, torch.Tensor]:
    """Returns the trained tensors by name: `NAME.a` [r, in] and `NAME.b` [out, r]."""
    tensors = {}
    for name, module in added.items():
        tensors[f"{name}.a"], tensors[f"{name}.b"] = module.a.detach(), module.b.detach()
    return tensors


@torch.no_grad()
def merge_lora(decoder: nn.Module, tensors: Mapping[str, torch.Tensor], scale: float) -> None:
    """Adds trained additions to the weights of a decoder in place, computed in float32.

    Raises:
        ConfigError: an addition does not fit the decoder.
    """
    for name in sorted({key.rpartition(".")[0] for key in tensors}):
        first, second = tensors.get(f"{name}.a"), tensors.get(f"{name}.b")
        try:
            weight = decoder.get_submodule(name).weight
        except AttributeError:
            weight = None
        if first is None or second is None or not isinstance(weight, torch.Tensor) or weight.shape != (len(second), first.shape[1]):  # fmt: skip
            raise ConfigError(
                f"weights: the addition to {name} does not fit the decoder. Allowed: weights that were trained on this "
                "model. Train them again: oval train llava"
            )
        weight += (scale * (second.float() @ first.float())).to(weight.dtype)
