"""The attention function that transformers calls while an OVAL cache is in use, and its registration."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from oval_core.errors import UnsupportedModelError
from oval_core.paged_cache import PagedCache
from oval_core.values import LayerSpec

VIEW_KEY = "oval_view"
"""Keyword under which `OvalCache.update` hands the layer's view to the attention function."""

_UNSUPPORTED = ("position_bias", "s_aux")
"""Attention arguments that change the result and that no backend computes."""


class LayerView:
    """One layer of a paged cache, as the attention function sees it."""

    __slots__ = ("layer_idx", "paged", "window")

    def __init__(self, paged: PagedCache, layer_idx: int, window: int | None) -> None:
        self.paged = paged
        self.layer_idx = layer_idx
        self.window = window


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attends with query [B, H, T, D] over the pages; returns ([B, T, H, E], no weights).

    Key and value hold the new tokens only; the pool, reached through the view, holds them all. The mask is the
    attachment's empty stand-in: the plan of the forward knows padding, and the view knows the window.

    Raises:
        UnsupportedModelError: the call came without an OVAL cache, or asks for what no backend computes.
    """
    view = kwargs.get(VIEW_KEY)
    if view is None:
        raise UnsupportedModelError(
            f"{type(module).__name__}: attention ran on OVAL's backend without an OVAL cache. Allowed: caches "
            "that went through `OvalCache.update` in the same layer. Run this model without OVAL."
        )
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__}: got attention argument {name!r}, which no OVAL backend computes. "
                "Allowed: plain, windowed and soft-capped attention. Run this model without OVAL."
            )
    if dropout:
        raise UnsupportedModelError(
            f"{type(module).__name__}: got attention dropout {dropout}. Allowed: 0, as in evaluation. "
            "Call model.eval() first."
        )
    spec = LayerSpec(query.shape[-1] ** -0.5 if scaling is None else scaling, view.window, softcap)
    return view.paged.attend(view.layer_idx, query, spec), None


def register(name: str) -> None:
    """Makes the attention function known to transformers under this name."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)


def unregister(name: str) -> None:
    """Undoes `register`. transformers has no public call for it, hence the mapping itself."""
    AttentionInterface._global_mapping.pop(name, None)
    AttentionMaskInterface._global_mapping.pop(name, None)
