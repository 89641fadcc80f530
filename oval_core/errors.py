"""Every error that OVAL raises on bad input. Each message says: what, got, allowed, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OvalError(Exception):
    """Base of all OVAL errors: `except OvalError` catches what a user can mend."""


class ConfigError(OvalError, ValueError):
    """A configuration has an unknown key or a value out of range."""


class UnsupportedModelError(OvalError, ValueError):
    """The model, or a feature of it, is not one that OVAL can run exactly."""


class CacheMismatchError(OvalError, ValueError):
    """A cache was used with a model, batch, dtype, device or state that it does not belong to."""


class PromptTooLongError(OvalError, ValueError):
    """A prompt has more tokens than the model has positions."""


class FastMemoryError(OvalError, ValueError):
    """What a forward needs at once does not fit into `tiers.fast_tokens`."""


class TierError(OvalError, RuntimeError):
    """A page could not be moved between tiers: disk full, file damaged or gone, worker dead."""


class BackendUnavailableError(OvalError, RuntimeError):
    """An attention backend that was asked for by name cannot run here."""


def did_you_mean(got: str, allowed: Iterable[str]) -> str:
    """Returns the tail of an error message: the closest allowed name, then all of them."""
    names = sorted(allowed)
    close = difflib.get_close_matches(got, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Allowed: {', '.join(names)}."
