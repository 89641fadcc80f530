"""Checks that a forward fits an OVAL cache: its owner, its rows, its length. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from oval_core.errors import CacheMismatchError, PromptTooLongError

__all__ = ["check_length", "check_positions", "check_rows"]


def check_rows(is_owner: bool, cached: int, batch_size: int) -> None:
    """Raises `CacheMismatchError` unless the cache belongs to the model and has these rows.

    Args:
        is_owner: whether the attachment that made the cache is the one that runs.
        cached: rows of the cache; 0 where it is empty.
        batch_size: rows of the forward.
    """
    if not is_owner:
        raise CacheMismatchError(
            "this OVAL cache belongs to another model (or to an earlier attach of this one). Allowed: the "
            "cache of the running attach. Use `oval.new_cache()`, or let `generate` make one."
        )
    if cached and cached != batch_size:
        raise CacheMismatchError(
            f"batch size: got {batch_size}. Allowed: {cached}, the rows of this cache. Pass as many rows, "
            "or use a new cache."
        )


def check_length(lengths: Sequence[int], num_new: Sequence[int], limit: int | None) -> None:
    """Raises `PromptTooLongError` if a row with so many tokens, cached and new, has more than the model has positions."""
    if limit is not None:
        before = lengths or [0] * len(num_new)
        check_positions(max(n + new for n, new in zip(before, num_new, strict=True)), limit)


def check_positions(num_tokens: int, limit: int) -> None:
    """Raises `PromptTooLongError` if a prompt has more tokens than the model has positions."""
    if num_tokens > limit:
        raise PromptTooLongError(
            f"prompt: got {num_tokens} tokens. Allowed: {limit}, the positions of this model "
            "(max_position_embeddings). Shorten the prompt, or use a model with a longer context."
        )
