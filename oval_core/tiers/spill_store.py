"""Main memory up to a limit, a disk behind it: what has been in main memory longest goes on to the disk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oval_core.tiers.page_store import HostStore, PageStore, Piece


class SpillStore:
    """Puts pages into `host`; beyond `host_tokens` the oldest move on to `disk`, once.

    A page on its way is on the disk before it leaves main memory, so a reader always finds it.
    """

    def __init__(self, host: HostStore, disk: PageStore, host_tokens: int) -> None:
        self._host = host
        self._disk = disk
        self._limit = host_tokens
        self._tokens = 0
        self.name = f"{host.name} and {disk.name}"

    @property
    def bytes_stored(self) -> int:
        """Bytes of the records held in both."""
        return self._host.bytes_stored + self._disk.bytes_stored

    def put(self, page_id: int, num_tokens: int, record: np.ndarray) -> None:
        """Takes over a record; see `PageStore.put`."""
        if num_tokens > self._limit:
            self._disk.put(page_id, num_tokens, record)
            return
        while self._tokens + num_tokens > self._limit:
            oldest = self._host.oldest()
            count = self._host.num_tokens(oldest)
            self._disk.put(oldest, count, self._host.read_record(oldest))
            self._host.drop(oldest)
            self._tokens -= count
        self._host.put(page_id, num_tokens, record)
        self._tokens += num_tokens

    def read(self, layer: int, pieces: Sequence[Piece]) -> None:
        """Reads each chunk from where it is; see `PageStore.read`."""
        below = []
        for piece in pieces:
            try:
                self._host.read(layer, [piece])
            except KeyError:  # on the disk, or gone there just now
                below.append(piece)
        if below:
            self._disk.read(layer, below)

    def read_record(self, page_id: int) -> np.ndarray:
        """Returns a copy of a whole record."""
        return (self._host if page_id in self._host else self._disk).read_record(page_id)

    def drop(self, page_id: int) -> None:
        """Forgets a page."""
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
