"""Refuses heads that belong to another base model. It knows shapes and names, no files."""

from __future__ import annotations

from pathlib import Path

from oval_core.errors import ConfigError
from oval_spec.heads.facts import BaseFacts


def check_fit(
    folder: Path,
    base: BaseFacts,
    *,
    hidden_size: object = None,
    vocab_size: object = None,
    model_type: object = None,
) -> None:
    """Raises `ConfigError` where heads do not fit; None is what is not known of them.

    Args:
        folder: where the heads are.
        base: the model that they should draft for.
        hidden_size: C that the heads were made for.
        vocab_size: V that they were made for.
        model_type: family of the decoder that they were made for.
    """
    pairs = (
        ("hidden size", hidden_size, base.hidden_size),
        ("vocabulary", vocab_size, base.vocab_size),
        ("model family", model_type or None, base.model_type or None),
    )
    for what, own, wanted in pairs:
        if own is not None and wanted is not None and own != wanted:
            raise ConfigError(
                f"heads {folder}: got heads for a model with {what} {own}, and a model with {what} {wanted}. Allowed: "
                "heads that were trained for this model. Name such heads, or train some (`oval train medusa`)."
            )
