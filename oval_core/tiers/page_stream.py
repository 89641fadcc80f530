"""Brings the pages that are not in fast memory to each layer in turn, through a few buffers, ahead of need.

A forward's *script* says which batches its layers will read, in order. The next forward will most likely read the same
ones, so after the last batch of a script its first ones are fetched again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence, Set

from oval_core.metrics import TierCounters
from oval_core.tiers.prefetcher import Prefetcher
from oval_core.tiers.transfer import Batch, Buffer, State, Transfer

Order = Callable[[Sequence[Batch], int], Sequence[Batch]]
"""Returns what to fetch ahead while layer n (a place among the tiered layers, -1 before the first) is next, in order."""


def everything(script: Sequence[Batch], layer: int) -> Sequence[Batch]:
    """The known order: the rest of this forward, then the beginning of the next one."""
    return [b for b in script if b.layer >= layer] + [b for b in script if b.layer < layer]


def next_layer(script: Sequence[Batch], layer: int) -> Sequence[Batch]:
    """Whole layers, one ahead, as Hugging Face offloads a cache: layer n + 1 begins to come when layer n runs."""
    wanted = (layer + 1) % (1 + max((b.layer for b in script), default=0))
    return [b for b in script if b.layer == wanted]


def newest(script: Sequence[Batch], layer: int) -> Sequence[Batch]:
    """Of every layer the last batch only: the most recent pages that are not in fast memory."""
    last = {b.layer: b for b in script}
    return [b for b in everything(script, layer) if last[b.layer] is b]


def nothing(script: Sequence[Batch], layer: int) -> Sequence[Batch]:  # noqa: ARG001 - an `Order`
    """No prefetch."""
    return ()


ORDERS: dict[str, Order] = {
    "layer": next_layer,
    "none": nothing,
    "oracle": everything,
    "recent": newest,
}


Asked = Callable[[bool, int], None]
"""Told of every batch that a layer asked for: whether it was there, and its pages."""


class PageStream:
    """Hands out batches in buffers, prefetched by the order it was made with."""

    def __init__(
        self,
        prefetcher: Prefetcher,
        buffers: Sequence[Buffer],
        token_bytes: Sequence[int],
        order: Order,
        counters: TierCounters,
    ) -> None:
        self._prefetcher = prefetcher
        self._free = list(buffers)
        self._token_bytes = token_bytes
        self._order = order
        self._counters = counters
        self._ahead: dict[tuple[int, tuple[int, ...]], Transfer] = {}
        self._script: Sequence[Batch] = ()
        self._todo: deque[Batch] = deque()
        self._asked: set[tuple[int, tuple[int, ...]]] = set()  # by the layer that is reading
        self._clock = 0
        self._seen = (0, 0, 0.0)

    @property
    def bytes_waiting(self) -> int:
        """Bytes fetched ahead, begun or done, that nobody has read yet."""
        return sum(
            t.num_bytes for t in self._ahead.values() if t.state in (State.RUNNING, State.DONE)
        )

    def begin(self, script: Sequence[Batch]) -> None:
        """Starts a forward; what was fetched ahead and is not in its script is thrown away."""
        self.expect(script)
        self.approach(-1)

    def expect(self, script: Sequence[Batch]) -> None:
        """Takes over what the next forward will most likely read; `end` starts to fetch it."""
        self._script = script
        wanted = {batch.key for batch in script}
        for key in [key for key in self._ahead if key not in wanted]:
            self._discard(key)

    def approach(self, layer: int) -> None:
        """Starts to fetch what should be fetched when this layer is next, -1 before the first."""
        self._todo = deque(self._order(self._script, layer))
        self._asked.clear()
        self._pump()

    def read(self, batches: Sequence[Batch], asked: Asked) -> Generator[tuple[Batch, Buffer]]:
        """Yields a layer's batches, each when it is there. A buffer is taken back when the next is asked for."""
        for batch in batches:
            transfer = self._take(batch)
            is_read = False
            try:
                asked(self._await(transfer), len(batch.page_ids))
                is_read = True
                yield batch, transfer.buffer
            finally:
                self._give_back(transfer, is_read)
            self._pump()

    def end(self) -> None:
        """Ends a forward: the next one is expected to read the same."""
        self.approach(-1)
        self.count()

    def forget(self, page_ids: Set[int]) -> None:
        """Throws away what was fetched of pages that ended; nobody reads their records afterwards."""
        if not page_ids:
            return
        self._script = [b for b in self._script if page_ids.isdisjoint(b.page_ids)]
        self._todo = deque(b for b in self._todo if page_ids.isdisjoint(b.page_ids))
        for key in [key for key in self._ahead if not page_ids.isdisjoint(key[1])]:
            self._discard(key)

    def drain(self) -> None:
        """Throws away everything that was fetched ahead."""
        self._script, self._todo = (), deque()
        for key in list(self._ahead):
            self._discard(key)
        self.count()

    def count(self) -> None:
        """Brings the totals up to what the worker has done."""
        done = (
            self._prefetcher.bytes_ahead,
            self._prefetcher.transfers,
            self._prefetcher.transfer_s,
        )
        before, self._seen = self._seen, done
        self._counters.bytes_prefetched += done[0] - before[0]
        self._counters.transfers += done[1] - before[1]
        self._counters.transfer_s += done[2] - before[2]

    def _pump(self) -> None:
        while self._todo and self._free:
            batch = self._todo.popleft()
            if batch.key not in self._ahead and batch.key not in self._asked:
                self._clock += 1
                self._submit(batch, self._free.pop(), float(self._clock), ahead=True)

    def _submit(self, batch: Batch, buffer: Buffer, priority: float, ahead: bool) -> Transfer:
        num_bytes = batch.num_tokens * self._token_bytes[batch.layer]
        transfer = Transfer(batch, buffer, num_bytes, priority, ahead)
        try:
            self._prefetcher.submit(transfer)
        except BaseException:
            self._free.append(buffer)
            raise
        if ahead:
            self._ahead[batch.key] = transfer
        return transfer

    def _take(self, batch: Batch) -> Transfer:
        self._asked.add(batch.key)
        transfer = self._ahead.pop(batch.key, None)
        if transfer is not None and transfer.error is None:
            return transfer
        if transfer is not None:  # it failed while nobody asked; asked for now, it may work
            self._give_back(transfer, is_read=False)
        if not self._free:  # everything ahead is for later: the last of it gives way
            last = max(
                self._ahead.values(), key=lambda t: (t.state is not State.RUNNING, t.priority)
            )
            self._todo.appendleft(last.batch)
            self._discard(last.batch.key)
        return self._submit(batch, self._free.pop(), -1.0, ahead=False)

    def _await(self, transfer: Transfer) -> bool:
        """Waits; returns whether there was nothing to wait for."""
        counters = self._counters
        asked = time.perf_counter()
        in_time = transfer.ahead and transfer.state is State.DONE
        self._prefetcher.wait(transfer)
        if transfer.ahead:
            counters.leads += 1
            counters.lead_s += max(0.0, asked - transfer.done_at)
        if not in_time:
            counters.stall_s += time.perf_counter() - asked
            counters.bytes_late += transfer.num_bytes
        return in_time

    def _give_back(self, transfer: Transfer, is_read: bool) -> None:
        if transfer.state is not State.DONE:  # not wanted any more, or interrupted while waiting
            self._prefetcher.cancel(transfer)
            self._prefetcher.settle(transfer)
        self._account(transfer, is_read)
        if is_read:
            transfer.buffer.released()
        self._free.append(transfer.buffer)

    def _discard(self, key: tuple[int, tuple[int, ...]]) -> None:
        self._give_back(self._ahead.pop(key), is_read=False)

    def _account(self, transfer: Transfer, is_read: bool) -> None:
        if transfer.state is State.CANCELLED:
            return
        if not transfer.ahead:
            self._counters.bytes_demanded += transfer.num_bytes
        elif is_read:
            self._counters.bytes_used += transfer.num_bytes
        else:
            self._counters.bytes_wasted += transfer.num_bytes
