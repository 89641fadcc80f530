"""Finds a model's decoder, and checks the arguments of its forwards on an OVAL cache. Changes nothing."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from oval_core.errors import CacheMismatchError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["check_call", "decoder_of", "named_arguments", "positions_of"]


def decoder_of(model: PreTrainedModel) -> torch.nn.Module:
    """Returns the decoder of a model, or raises `UnsupportedModelError`."""
    if not hasattr(model, "generate") or not hasattr(model, "get_decoder"):
        raise UnsupportedModelError(
            f"attach: got {type(model).__name__}. Allowed: a transformers model with generate(), such as "
            "LlamaForCausalLM or LlavaForConditionalGeneration. Load one and pass it."
        )
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"attach: got an encoder-decoder model ({model.config.model_type}). Allowed: decoders. "
            "Run this model without OVAL."
        )
    decoder: torch.nn.Module = model.get_decoder()
    return decoder


def named_arguments(decoder: torch.nn.Module, args: tuple[Any, ...]) -> dict[str, Any]:
    """Returns positional arguments of a decoder's forward by name."""
    # of the class: an instance's forward may be wrapped by someone as (*args, **kwargs)
    bound = inspect.signature(type(decoder).forward).bind_partial(decoder, *args)
    return dict(list(bound.arguments.items())[1:])  # without self


def positions_of(kwargs: dict[str, Any], states: torch.Tensor, cached: int) -> torch.Tensor:
    """Returns the position ids [B or 1, T] of a decoder's forward: those that it got, or would make."""
    given: torch.Tensor | None = kwargs.get("position_ids")
    if given is not None:
        return given
    return torch.arange(cached, cached + states.shape[1], device=states.device)[None]


def check_call(kwargs: dict[str, Any], config: PretrainedConfig) -> None:
    """Raises where OVAL could not compute what a forward asks for."""
    if torch.is_grad_enabled():
        raise CacheMismatchError(
            "a forward with an OVAL cache ran with gradients on. Allowed: inference. Wrap the call in "
            "torch.no_grad(), or train without a cache."
        )
    if isinstance(kwargs.get("attention_mask"), dict):
        raise UnsupportedModelError(
            "attention_mask: got a dict of ready masks. Allowed: a 2-D or 4-D tensor, or None. Pass the 2-D mask."
        )
    if kwargs.get("output_attentions", config.output_attentions):
        raise UnsupportedModelError(
            "output_attentions=True: OVAL never builds the weights. Allowed: False. Run such a call with "
            "use_oval=False and attn_implementation='eager'."
        )
