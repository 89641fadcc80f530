"""Lets a cache be read by another policy for a while: forwards of a draft, all of them dropped when it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from oval_core.errors import CacheMismatchError, ConfigError
from oval_core.metrics import CacheCounters
from oval_core.policy import SelectionPolicy

if TYPE_CHECKING:
    from oval_core.paged_cache import PagedCache


@contextlib.contextmanager
def drafting(cache: PagedCache, policy: SelectionPolicy) -> Iterator[None]:
    """Reads by `policy` in the `with` block; tokens appended there are dropped at its end, also by an error.

    See `PagedCache.drafting`.
    """
    _check(cache, policy)
    lengths = [seq.num_committed for seq in cache.table.sequences]
    totals, last_step = cache.counters, cache.last_step
    own = cache.read_by(policy, None)
    cache.counters, cache.draft_lengths = CacheCounters(), lengths
    try:
        yield
    finally:
        cache.draft_lengths = None
        try:
            cache.drop_after(lengths)
        finally:
            cache.read_by(*own)
            drafted, cache.counters, cache.last_step = cache.counters, totals, last_step
            totals.pool_growths += drafted.pool_growths
            totals.slots_copied += drafted.slots_copied
            totals.peak_bytes = max(totals.peak_bytes, drafted.peak_bytes)


def check_not_drafting(cache: PagedCache, what: str) -> None:
    """Raises `CacheMismatchError` inside of `drafting`."""
    if cache.draft_lengths is not None:
        raise CacheMismatchError(
            f"{what}: got it while a draft runs on this cache. Allowed: forwards only. Do it after the draft."
        )


def _check(cache: PagedCache, policy: SelectionPolicy) -> None:
    check_not_drafting(cache, "drafting")
    if cache.is_running:
        raise CacheMismatchError(
            "drafting: got it while a forward runs or is held. Allowed: between forwards. Accept or abort it first."
        )
    if not cache.batch_size:
        raise CacheMismatchError(
            "drafting: got an empty cache. Allowed: one with a text. Run the prompt first."
        )
    if policy is cache.policy:
        raise ConfigError(
            "drafting: got the policy of the cache itself. Allowed: another one. Pass a policy of its own."
        )
    if policy.tracks_hidden and not cache.tracks_hidden:
        raise ConfigError(
            f"drafting: got policy {policy.name!r}, which reads hidden states that this cache does not keep. Allowed: "
            "caches with track_hidden. Set it, or draft by another router."
        )
