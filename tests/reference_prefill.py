"""Slow oracle of prefill routing: one plain Hugging Face forward over the whole text, no cache, with a mask written out."""

from __future__ import annotations

from typing import Any

import torch

NEVER = 1 << 30


def read_times(cache: Any, row: int, turns: list[int]) -> list[int]:
    """Turn in which each column of a row was read, from the cache's own account after each turn.

    Args:
        cache: after the last turn.
        row: of the cache.
        turns: columns before each turn, 0 first; ascending.
    """
    total = cache.get_seq_length()
    times = [max(t for t, start in enumerate(turns) if start <= column) for column in range(total)]
    unread = cache.unread_columns(row, 0, total).tolist()
    return [NEVER if missing else time for missing, time in zip(unread, times, strict=True)]


def visible(times: list[int], turns: list[int], late: dict[int, int], width: int) -> torch.Tensor:
    """Which columns each column sees, bool [width, width].

    Args:
        times: `NEVER` for columns that were never read.
        turns: columns before each turn.
        late: column -> the turn before which it was read after all.
        width: columns in all; those beyond `times` are new text.
    """
    seen = torch.zeros(width, width, dtype=torch.bool)
    for query in range(width):
        turn = max(t for t, start in enumerate(turns) if start <= query)
        for key in range(query + 1):
            if key < len(times) and times[key] == NEVER and key not in late:
                continue
            if key in late and query not in late and turn < late[key]:
                continue
            if key in late and query in late and late[query] < late[key]:
                continue
            seen[query, key] = True
        if not bool(seen[query].any()):
            seen[query, query] = True  # a column that nobody reads
    return seen


@torch.no_grad()
def greedy_slowly(
    model: Any, ids: torch.Tensor, pixels: torch.Tensor, seen: Any, count: int
) -> list[int]:
    """Greedy text of one row, a whole forward for each token.

    Args:
        model: LLaVA of Hugging Face, not attached.
        ids: [1, L] the text so far.
        pixels: of all its images.
        seen: makes the mask bool [W, W] for a width.
        count: tokens.
    """
    for _ in range(count):
        mask = seen(ids.shape[1])
        bias = torch.zeros(1, 1, *mask.shape).masked_fill(~mask, float("-inf"))
        logits = model(
            input_ids=ids, pixel_values=pixels, attention_mask=bias, use_cache=False
        ).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return ids[0, -count:].tolist()
