"""What `model.generate` does while attached: an OVAL cache is made and handed in; the rest is Hugging Face's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from oval_adapters.hf_cache import OvalCache
from oval_adapters.speculative.outer_call import SPARE_TOKENS, speculative_call
from oval_core.errors import ConfigError
from oval_core.routing.router import Router

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from oval_adapters.attachment import Attachment

_log = logging.getLogger(__name__)
_ROUTER_PARTS = ("name", "lead", "needs", "score")


def wrap_generate(attachment: Attachment, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `generate` with an OVAL cache in place of the `DynamicCache` that it would make.

    The returned function takes everything that `generate` takes, and:
        use_oval: False runs this call as if not attached.
        oval_router: scores pages in this call, in place of the router of the settings; a
            `oval_core.routing.router.Router`, such as `OVALRouter`. The policy `full` reads every page and uses none.
        oval_page_manager: part of the article's call style; checked, and not used: pages and their co-occurrence
            are the cache's own.
    With `custom_generate=oval.speculative` also:
        speculation: settings of this call, a `SpeculationConfig` or a mapping of its values.
        oval_drafter: an `oval_spec.drafter.Drafter` that drafts in this call.
    A call that brings its own cache, `use_cache=False` or a `cache_implementation` keeps it.
    """

    def generate(
        *args: Any,
        use_oval: bool = True,
        oval_router: Router | None = None,
        oval_page_manager: object | None = None,
        **kwargs: Any,
    ) -> Any:
        _check_parts(attachment, use_oval, oval_router, oval_page_manager)
        if kwargs.get("past_key_values", ...) is None:
            del kwargs["past_key_values"]
        spare = 0
        if kwargs.get("custom_generate") is attachment.speculative:
            args, kwargs = speculative_call(attachment, original, args, kwargs, use_oval=use_oval)
            spare = SPARE_TOKENS
        own, made = kwargs.get("cache", kwargs.get("past_key_values")), None
        if not use_oval:
            _check_not_ours(own)
            return original(*args, **kwargs)
        settings = _Settings(attachment.model.generation_config, args, kwargs)
        prompt = _prompt(args, kwargs)
        if own is None:
            if settings.wants_other_cache():
                return original(*args, **kwargs)
            attachment.check_prompt(prompt, kwargs.get("attention_mask"))
            made = attachment.new_cache(settings.expected_tokens(prompt) + spare, oval_router)
            kwargs["cache"] = own = made
        elif oval_router is not None:
            _log.warning("oval_router is not used: the call brings a cache, which has its router.")
        if not attachment.owns(own):
            return original(*args, **kwargs)
        _warn_of_padding(kwargs.get("attention_mask"))
        with attachment.generating(prompt, own.get_seq_length()):
            return _closing(made, original, args, kwargs)

    return generate


def _closing(
    made: OvalCache | None,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls `generate`; the cache made for it is closed, unless the caller gets it with the output."""
    output = None
    try:
        output = original(*args, **kwargs)
        return output
    finally:
        if made is not None and getattr(output, "cache", None) is not made:
            made.close()


class _Settings:
    """Reads `generate`'s settings with its own precedence: keyword, passed config, model's config."""

    def __init__(
        self, default: GenerationConfig | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._kwargs = kwargs
        self._passed = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
        self._default = default

    def get(self, name: str) -> Any:
        """Returns what `generate` will use, or None."""
        value = self._kwargs.get(name)
        for config in (self._passed, self._default):
            if value is None:
                value = getattr(config, name, None)
        return value

    def wants_other_cache(self) -> bool:
        """Whether the caller or the model chose a cache, or none: that choice stands."""
        chosen = self.get("cache_implementation")
        if chosen == "hybrid":
            chosen = None  # an old default of Gemma 2 checkpoints; transformers drops it itself
        if chosen is not None:
            _log.warning("cache_implementation=%r is set: this call runs without OVAL", chosen)
        return chosen is not None or self.get("use_cache") is False

    def expected_tokens(self, prompt: torch.Tensor | None) -> int:
        """Returns how many tokens a row will hold at most: memory to set aside, not a limit."""
        length = 1 if prompt is None else int(prompt.shape[1])
        new = self.get("max_new_tokens")
        if new is not None:
            return length + int(new)
        return max(length + 1, int(self.get("max_length") or 0))


def _prompt(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Returns the ids [B, T] or embeddings [B, T, C] that `generate` was given."""
    inputs = kwargs.get("inputs", args[0] if args else None)
    for value in (kwargs.get("inputs_embeds"), kwargs.get("input_ids"), inputs):
        if value is not None:
            prompt: torch.Tensor = value
            return prompt
    return None


def _warn_of_padding(mask: torch.Tensor | None) -> None:
    if mask is None or mask.ndim != 2 or not mask.shape[1]:
        return
    if bool((mask.bool().any(1) & ~mask[:, -1].bool()).any()):
        _log.warning(
            "attention_mask has 0 in its last column (padding on the right): such rows go on from a padding token, where "
            "texts are nobody's and differ from Hugging Face's. Set tokenizer.padding_side = 'left'."
        )


def _check_not_ours(cache: object) -> None:
    if isinstance(cache, OvalCache):
        raise ConfigError(
            "use_oval: got False together with an OVAL cache. Allowed: one or the other. Leave the cache out, or "
            "pass cache.to_dynamic_cache()."
        )


def _check_parts(
    attachment: Attachment, use_oval: object, router: object, page_manager: object
) -> None:
    if not isinstance(use_oval, bool):
        raise ConfigError(f"use_oval: got {use_oval!r}. Allowed: True or False. Pass one of them.")
    if router is not None and not all(hasattr(router, name) for name in _ROUTER_PARTS):
        raise ConfigError(
            f"oval_router: got {type(router).__name__}. Allowed: a router (an object with {', '.join(_ROUTER_PARTS)}, such "
            "as oval_core.OVALRouter), or None. Pass a router, not its name."
        )
    if page_manager is not None and isinstance(page_manager, str | bytes | int | float | bool):
        raise ConfigError(
            f"oval_page_manager: got {page_manager!r}. Allowed: a page manager object, or None. "
            "Pass the object itself."
        )
    if router is not None and attachment.config.policy == "full":
        _log.warning("oval_router is not used: the policy 'full' reads every page.")
    elif getattr(router, "training", False):
        _log.warning("oval_router is in training mode: its scores are random. Call router.eval().")
    if page_manager is not None:
        _log.warning("oval_page_manager is not used: pages and their graph are the cache's own.")
