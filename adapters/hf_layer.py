"""`OvalLayer`: one layer of an `OvalCache`, for code that walks `cache.layers`. It holds nothing."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

from oval_core.errors import CacheMismatchError

if TYPE_CHECKING:
    from oval_adapters.hf_cache import OvalCache


class OvalLayer(CacheLayerMixin):
    """One layer of an `OvalCache`, for code that walks `cache.layers`. Reading keys or values copies them."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: OvalCache, layer_idx: int) -> None:
        # not a cycle: a cache that nobody holds must end at once, its file and worker with it
        self._held = weakref.ref(cache)
        self._layer_idx = layer_idx

    @property
    def _cache(self) -> OvalCache:
        cache = self._held()
        if cache is None:
            raise CacheMismatchError(
                "this layer outlived its OVAL cache. Allowed: layers of a cache that is still held. Hold the cache."
            )
        return cache

    @property
    def is_initialized(self) -> bool:
        """Whether a token was written."""
        return self.get_seq_length() > 0

    @property
    def keys(self) -> torch.Tensor | None:
        """Keys [B, K, L, D], copied from the pages; zeros where there is padding."""
        grid = self._cache.grid(self._layer_idx)
        return None if grid is None else grid[0]

    @property
    def values(self) -> torch.Tensor | None:
        """Values [B, K, L, E], copied from the pages; zeros where there is padding."""
        grid = self._cache.grid(self._layer_idx)
        return None if grid is None else grid[1]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing: the first write sets memory aside."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes through the cache; see `OvalCache.update`."""
        return self._cache.update(key_states, value_states, self._layer_idx, *args, **kwargs)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """See `OvalCache.get_mask_sizes`."""
        return self._cache.get_mask_sizes(query_length, self._layer_idx)

    def get_seq_length(self) -> int:
        """See `OvalCache.get_seq_length`."""
        return self._cache.get_seq_length()

    def get_max_length(self) -> int:
        """See `OvalCache.get_max_length`."""
        return self._cache.get_max_length()
