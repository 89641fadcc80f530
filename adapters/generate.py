"""What `model.generate` does while attached: an OVAL cache is made and handed in; the rest is Hugging Face's."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from oval_core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from oval_adapters.attachment import Attachment

_log = logging.getLogger(__name__)


def wrap_generate(attachment: Attachment, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `generate` with an OVAL cache in place of the `DynamicCache` that it would make.

    The returned function takes everything that `generate` takes, and:
        use_oval: False runs this call as if not attached.
        oval_router, oval_page_manager: parts of the article's call style; checked, and not used by the
            policy `full`, which reads every page.
    A call that brings its own cache, `use_cache=False` or a `cache_implementation` keeps it.
    """

    def generate(
        *args: Any,
        use_oval: bool = True,
        oval_router: torch.nn.Module | None = None,
        oval_page_manager: object | None = None,
        **kwargs: Any,
    ) -> Any:
        _check_parts(use_oval, oval_router, oval_page_manager)
        if not use_oval:
            return original(*args, **kwargs)
        own = kwargs.get("cache", kwargs.get("past_key_values"))
        settings = _Settings(attachment.model.generation_config, args, kwargs)
        if own is None:
            if settings.wants_other_cache():
                return original(*args, **kwargs)
            kwargs["cache"] = own = attachment.new_cache(settings.expected_tokens(args, kwargs))
            settings.drop_default_implementation(kwargs)
        if not attachment.owns(own):
            return original(*args, **kwargs)
        with attachment.generating():
            return original(*args, **kwargs)

    return generate


class _Settings:
    """Reads `generate`'s settings with its own precedence: keyword, passed config, model's config."""

    def __init__(
        self, default: GenerationConfig | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._kwargs = kwargs
        self._passed = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
        self._default = default

    def explicit(self, name: str) -> Any:
        """Returns what the caller set, or None."""
        value = self._kwargs.get(name)
        return value if value is not None else getattr(self._passed, name, None)

    def get(self, name: str) -> Any:
        """Returns what `generate` will use, or None."""
        value = self.explicit(name)
        return value if value is not None else getattr(self._default, name, None)

    def wants_other_cache(self) -> bool:
        """Whether the caller chose a cache, or none: that choice stands."""
        chosen = self.explicit("cache_implementation")
        if chosen is not None:
            _log.info("cache_implementation=%r was asked for: this call runs without OVAL", chosen)
        return chosen is not None or self.get("use_cache") is False

    def drop_default_implementation(self, kwargs: dict[str, Any]) -> None:
        """Keeps a model's own default cache (Gemma 2: hybrid) from clashing with ours."""
        if getattr(self._default, "cache_implementation", None) is None:
            return
        config = copy.deepcopy(self._passed if self._passed is not None else self._default)
        config.cache_implementation = None
        kwargs["generation_config"] = config

    def expected_tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Returns how many tokens a row will hold at most: memory to set aside, not a limit."""
        prompt = next(
            (
                value
                for value in (
                    kwargs.get("inputs_embeds"),
                    kwargs.get("input_ids"),
                    kwargs.get("inputs", args[0] if args else None),
                )
                if value is not None
            ),
            None,
        )
        length = 1 if prompt is None else int(prompt.shape[1])
        new = self.get("max_new_tokens")
        if new is not None:
            return length + int(new)
        return max(length + 1, int(self.get("max_length") or 0))


def _check_parts(use_oval: object, router: object, page_manager: object) -> None:
    if not isinstance(use_oval, bool):
        raise ConfigError(f"use_oval: got {use_oval!r}. Allowed: True or False. Pass one of them.")
    if router is not None and not isinstance(router, torch.nn.Module):
        raise ConfigError(
            f"oval_router: got {type(router).__name__}. Allowed: a torch.nn.Module that maps hidden states to "
            "page scores, or None. Pass a router, not its name."
        )
    if page_manager is not None and isinstance(page_manager, str | bytes | int | float | bool):
        raise ConfigError(
            f"oval_page_manager: got {page_manager!r}. Allowed: a page manager object, or None. "
            "Pass the object itself."
        )
    if router is not None or page_manager is not None:
        _log.warning(
            "oval_router and oval_page_manager were checked and are not used: the policy 'full' reads every page."
        )
