"""What `custom_generate=oval.speculative` refuses, before any work is done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.configuration_utils import GenerationMode
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from oval_adapters.speculative.row_processors import check_processors
from oval_core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel
    from transformers.generation import LogitsProcessorList

    from oval_adapters.attachment import Attachment
    from oval_adapters.hf_cache import OvalCache

__all__ = ["check_call", "check_drafter", "check_mask", "check_outer_call"]

_WHAT = "custom_generate=oval.speculative"
_DRAFTER_PARTS = ("name", "needs_hidden", "reset", "draft")


def check_outer_call(arguments: dict[str, Any], model: PreTrainedModel, *, use_oval: bool) -> None:
    """Checks what `generate` does not hand on to the loop.

    Args:
        arguments: of the call, by name.
        model: the attached model.
        use_oval: whether the call runs on OVAL.
    Raises:
        ConfigError: the call asks for something else besides.
    """
    if not use_oval:
        raise ConfigError(
            f"{_WHAT}: got it with use_oval=False. Allowed: one or the other. Leave one out."
        )
    for name in ("assistant_model", "assistant_tokenizer"):
        if arguments.get(name) is not None:
            raise ConfigError(
                f"{_WHAT}: got {name}. Allowed: a draft model by `speculation={{'drafter': 'draft', 'draft_model': ...}}`. "
                f"Leave {name} out."
            )
    shares = arguments.get("synced_gpus")
    if shares is None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
        shares = distributed and torch.distributed.get_world_size() > 1 and sharded
    if shares:
        raise ConfigError(
            f"{_WHAT}: got synced_gpus (a model sharded by FSDP or ZeRO-3). Allowed: whole models, one a process, as "
            "steps differ from process to process. Load the model whole, or leave custom_generate out."
        )


def check_call(
    attachment: Attachment,
    model: PreTrainedModel,
    processors: LogitsProcessorList,
    settings: GenerationConfig,
    cache: object,
) -> None:
    """Checks the call that `generate` has made ready.

    Raises:
        ConfigError: another model, another cache, or a way to decode that is not one token after another.
    """
    if model is not attachment.model or not attachment.is_attached:
        raise ConfigError(
            f"{_WHAT}: got a model that this `oval` is not attached to. Allowed: the attached model, while attached. Use "
            "the `oval` of its own attach()."
        )
    if not attachment.owns(cache):
        raise ConfigError(
            f"{_WHAT}: got {type(cache).__name__} as cache. Allowed: an OVAL cache of this attach, or none given. Leave "
            "cache, use_cache and cache_implementation out."
        )
    mode = settings.get_generation_mode(None)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ConfigError(
            f"{_WHAT}: got settings for {mode.value}. Allowed: greedy decoding and sampling. Leave num_beams, "
            "prompt_lookup_num_tokens, penalty_alpha and the like out, or leave custom_generate out."
        )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(settings, name, None):
            raise ConfigError(
                f"{_WHAT}: got {name}=True. Allowed: False, since a forward holds nodes that do not count. Leave it out, "
                "or leave custom_generate out."
            )
    check_processors(processors)


def check_drafter(drafter: object) -> None:
    """Raises `ConfigError` for a drafter of the caller that cannot draft; None is none."""
    if drafter is None or all(hasattr(drafter, name) for name in _DRAFTER_PARTS):
        return
    raise ConfigError(
        f"oval_drafter: got {type(drafter).__name__}. Allowed: a drafter (an object with {', '.join(_DRAFTER_PARTS)}), or "
        "None. Pass a drafter, not its name: names go into speculation={'drafter': ...}."
    )


def check_mask(cache: OvalCache, mask: torch.Tensor | None) -> None:
    """Raises `ConfigError` for a mask [B, L] that hides tokens of the cache, or that no text can go on from.

    Forwards of trees take no mask; and what a model says after padding is nobody's text.
    """
    if mask is None or mask.ndim != 2:
        return
    if bool((mask.bool().any(1) & ~mask[:, -1].bool()).any()):
        raise ConfigError(
            f"{_WHAT}: got an attention_mask with 0 in its last column (padding on the right). Allowed: padding on the "
            "left, so that every row ends with its own last token. Set tokenizer.padding_side = 'left'."
        )
    cached = cache.get_seq_length()
    if not cached:
        return
    requests, _ = cache.check(cache.owner, mask, len(mask), mask.shape[1] - cached)
    if any(request.hidden is not None for request in requests):
        raise ConfigError(
            f"{_WHAT}: got an attention_mask with 0 for tokens that the cache holds, such as the padding behind rows that "
            "ended in an earlier plain turn. Allowed: 0 for what is not cached. Pass a new cache with the whole text, or "
            "leave custom_generate out in this turn."
        )
