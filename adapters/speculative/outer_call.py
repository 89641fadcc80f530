"""What `generate` keeps from a callable that it is given: streamer and tokenizer are taken out of the call and handed on."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from oval_adapters.speculative.door import check_outer_call

if TYPE_CHECKING:
    from oval_adapters.attachment import Attachment

__all__ = ["SPARE_TOKENS", "speculative_call"]

SPARE_TOKENS = 64
"""Slots that a row needs for nodes that do not count yet, beside its text."""


def speculative_call(
    attachment: Attachment,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    use_oval: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of `generate` for a speculative call.

    transformers gives a callable neither the streamer nor the tokenizer, and asks for the tokenizer itself where there are
    stop strings: these become the criterion that it would make of them.

    Raises:
        ConfigError: the call asks for what it could not hand on.
    """
    names = list(inspect.signature(original).parameters)
    named = dict(zip(names, args, strict=False))
    check_outer_call({**named, **kwargs}, attachment.model, use_oval=use_oval)
    tokenizer = kwargs.pop("tokenizer", None)
    if tokenizer is not None:
        kwargs = {**named, **kwargs}
        args = ()
        _take_stop_strings(attachment, tokenizer, kwargs)
    kwargs["custom_generate"] = functools.partial(
        attachment.speculative,
        streamer=kwargs.get("streamer", named.get("streamer")),
        target_tokenizer=tokenizer,
    )
    return args, kwargs


def _take_stop_strings(attachment: Attachment, tokenizer: Any, kwargs: dict[str, Any]) -> None:
    from transformers.generation import StoppingCriteriaList, StopStringCriteria

    default = attachment.model.generation_config.stop_strings
    passed = kwargs.get("generation_config")
    strings = kwargs.pop("stop_strings", None)
    if strings is None and passed is not None:
        strings = passed.stop_strings
    strings = default if strings is None else strings
    if strings is None:
        return
    if passed is not None and passed.stop_strings is not None:
        kwargs["generation_config"] = passed = copy.copy(passed)
        passed.stop_strings = None
    if default is not None:
        kwargs["stop_strings"] = None
    given = kwargs.get("stopping_criteria") or []
    kwargs["stopping_criteria"] = StoppingCriteriaList(
        [StopStringCriteria(stop_strings=strings, tokenizer=tokenizer), *given]
    )
