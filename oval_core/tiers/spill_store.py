"""Main memory up to a limit, a disk behind it: what has been in main memory longest goes on to the disk."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import numpy as np

from oval_core.native.chunk_io import Target
from oval_core.tiers.disk_store import DiskStore
from oval_core.tiers.page_store import HostStore


class SpillStore:
    """Puts pages into `host`; beyond `host_tokens` the oldest move on to `disk`, once.

    A lock keeps a page from moving while it is read.
    """

    name = "host and disk"

    def __init__(self, host: HostStore, disk: DiskStore, host_tokens: int) -> None:
        self._host = host
        self._disk = disk
        self._limit = host_tokens
        self._tokens = 0
        self._still = threading.Lock()

    @property
    def bytes_stored(self) -> int:
        """Bytes of the records held in both."""
        return self._host.bytes_stored + self._disk.bytes_stored

    def put(self, page_id: int, num_tokens: int, record: np.ndarray) -> None:
        """Takes over a record; see `PageStore.put`."""
        with self._still:
            if num_tokens > self._limit:
                self._disk.put(page_id, num_tokens, record)
                return
            while self._tokens + num_tokens > self._limit:
                self._pass_on(self._host.oldest())
            self._host.put(page_id, num_tokens, record)
            self._tokens += num_tokens

    def read(self, layer: int, page_ids: Sequence[int], target: Target) -> None:
        """Reads runs of pages from where they are; see `PageStore.read`."""
        with self._still:
            for in_host, run in itertools.groupby(page_ids, self._host.__contains__):
                store = self._host if in_host else self._disk
                ids = list(run)
                store.read(layer, ids, target)
                target = target.after(sum(map(store.num_tokens, ids)))

    def read_record(self, page_id: int) -> np.ndarray:
        """Returns a copy of a whole record."""
        with self._still:
            return (self._host if page_id in self._host else self._disk).read_record(page_id)

    def num_tokens(self, page_id: int) -> int:
        """Returns how many tokens a page has."""
        return (self._host if page_id in self._host else self._disk).num_tokens(page_id)

    def drop(self, page_id: int) -> None:
        """Forgets a page."""
        with self._still:
            if page_id in self._host:
                self._tokens -= self._host.num_tokens(page_id)
            self._host.drop(page_id)
            self._disk.drop(page_id)

    def __contains__(self, page_id: int) -> bool:
        return page_id in self._host or page_id in self._disk

    def clear(self) -> None:
        """Forgets every page."""
        self._host.clear()
        self._disk.clear()
        self._tokens = 0

    def close(self) -> None:
        """Gives everything back to the system."""
        self._host.close()
        self._disk.close()
        self._tokens = 0

    def _pass_on(self, page_id: int) -> None:
        count = self._host.num_tokens(page_id)
        self._disk.put(page_id, count, self._host.read_record(page_id))
        self._host.drop(page_id)
        self._tokens -= count
