"""How a budget of fast memory is shared out between the pool of pages and the buffers for transfers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from oval_core.config import MAX_PAGE_SIZE
from oval_core.errors import ConfigError

_BUFFERS = 4
"""Transfers that can be under way, waiting or being read at a time."""

_MIN_PAGES = 4
"""Pages that the pool must hold: the first, the last, the open one, and one to read."""


@dataclass(frozen=True, slots=True)
class FastMemory:
    """Sizes in tokens: of the pool in tokens of all tiered layers, of a buffer in tokens of one layer."""

    pool_slots: int
    num_buffers: int
    buffer_tokens: int

    def half_a_row(self, rows: int) -> int:
        """Returns what each row has of half of the pool, one slot at least."""
        return max(1, self.pool_slots // 2 // rows)


def share_out(fast_tokens: int, num_layers: int, page_size: int) -> FastMemory:
    """Gives a quarter of the budget to buffers, or what two of them need, and the rest to the pool.

    Raises:
        ConfigError: the budget is too small for so many layers and such pages.
    """
    staged = _staged(fast_tokens, num_layers)
    pool_slots = (fast_tokens - staged) // page_size * page_size
    if pool_slots < _MIN_PAGES * page_size:
        raise ConfigError(
            f"tiers.fast_tokens: got {fast_tokens}. Allowed with {num_layers} tiered layers and pages of {page_size}: "
            f"{_least_tokens(num_layers, page_size)} or more. Choose such a value, or smaller pages."
        )
    num_buffers = max(2, min(_BUFFERS, staged * num_layers // MAX_PAGE_SIZE))
    return FastMemory(pool_slots, num_buffers, staged * num_layers // num_buffers)


def _staged(fast_tokens: int, num_layers: int) -> int:
    return max(fast_tokens // 4, -(-2 * MAX_PAGE_SIZE // num_layers))


def _least_tokens(num_layers: int, page_size: int) -> int:
    pool = _MIN_PAGES * page_size
    return next(n for n in itertools.count(pool) if n - _staged(n, num_layers) >= pool)
