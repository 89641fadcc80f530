"""Replaces a method on one instance and puts it back. The only way OVAL touches a model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from oval_core.errors import CacheMismatchError

__all__ = ["OvalCall", "Patch"]


class OvalCall:
    """A wrapped method, so that a second attach can tell."""

    def __init__(self, call: Callable[..., Any], original: Callable[..., Any]) -> None:
        self._call = call
        functools.update_wrapper(self, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> OvalCall:
        # A copy would still run the first model's layers.
        raise CacheMismatchError(
            "copy.deepcopy: got a model that is attached to OVAL. Allowed: models that are not. "
            "Call detach() first, copy, and attach again."
        )


class Patch:
    """Wraps a method on one instance; `undo` leaves the instance as it was.

    Methods are replaced, not hooked: a wrapper can tidy up after a KeyboardInterrupt, torch's hooks cannot.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        name: str,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        original = getattr(module, name)
        self._module, self._name = module, name
        self._value = OvalCall(wrap(original), original)
        self._before = module.__dict__.get(name)
        module.__dict__[name] = self._value

    def check(self) -> None:
        """Raises `CacheMismatchError` if someone else patched on top since."""
        if self._module.__dict__.get(self._name) is not self._value:
            raise CacheMismatchError(
                f"{type(self._module).__name__}.{self._name} was replaced after attach. Allowed: to undo "
                "changes in the reverse order. Undo the later change first, then call detach()."
            )

    def undo(self) -> None:
        """Puts back what was there."""
        if self._before is None:
            del self._module.__dict__[self._name]
        else:
            self._module.__dict__[self._name] = self._before
