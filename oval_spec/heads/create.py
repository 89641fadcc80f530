"""Makes draft heads of a kind from plain values: what a file or a command line says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oval_core.errors import ConfigError, did_you_mean
from oval_spec.heads.base import DraftHeads
from oval_spec.heads.medusa import MedusaHeads
from oval_spec.heads.sequential import SequentialHeads
from oval_spec.heads.vocabulary import DraftVocabulary

_KINDS: tuple[type[DraftHeads], ...] = (MedusaHeads, SequentialHeads)


def create_heads(
    kind: str, settings: Mapping[str, Any], vocabulary: DraftVocabulary | None = None
) -> DraftHeads:
    """Returns untrained heads, in float32.

    Args:
        kind: `medusa` or `sequential`.
        settings: arguments of that class, `num_heads` and `hidden_size` among them.
        vocabulary: tokens that are drafted; None for all.
    """
    kinds = {made.kind: made for made in _KINDS}
    if kind not in kinds:
        raise ConfigError(f"draft heads: got kind {kind!r}; {did_you_mean(str(kind), kinds)}")
    try:
        return kinds[kind](**settings, vocabulary=vocabulary)
    except TypeError as error:
        raise ConfigError(
            f"draft heads of kind {kind!r}: got settings {dict(settings)} ({error}). Allowed: the arguments of "
            f"{kinds[kind].__name__}. Drop or add what the message names."
        ) from error
