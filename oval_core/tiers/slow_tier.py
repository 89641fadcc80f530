"""Everything behind fast memory of one cache: the store, the worker, the buffers. Made when the first page leaves."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Sequence, Set

import numpy as np
import torch

from oval_core.config import TierConfig
from oval_core.errors import CacheMismatchError
from oval_core.kv_pool import KVPool, LayerStore
from oval_core.metrics import TierCounters
from oval_core.native.chunk_io import Target
from oval_core.pages import Page
from oval_core.tiers.disk_store import DiskStore
from oval_core.tiers.fast_memory import FastMemory
from oval_core.tiers.link import LinkModel
from oval_core.tiers.page_files import folder_of
from oval_core.tiers.page_store import HostStore, PageStore
from oval_core.tiers.page_stream import ORDERS, Asked, PageStream
from oval_core.tiers.prefetcher import Prefetcher
from oval_core.tiers.record import LayerShape, RecordLayout, pack, unpack
from oval_core.tiers.residency import Residency
from oval_core.tiers.spill_store import SpillStore
from oval_core.tiers.transfer import Batch, Buffer, create_mover

_PACKED_PAGES = 4
"""Pages that are packed for a store at a time: bounds the memory that eviction takes."""


class SlowTier:
    """Records of pages that left the pool, and the way back."""

    def __init__(
        self,
        config: TierConfig,
        memory: FastMemory,
        pool: KVPool,
        layers: Sequence[int],
        counters: TierCounters,
    ) -> None:
        self._config = config
        self._memory = memory
        self._pool = pool
        self._layers = layers
        self._counters = counters
        self._versions: dict[int, int] = {}  # by page id: what its record was made from
        self._layout: RecordLayout | None = None
        self._store: PageStore | None = None
        self._stream: PageStream | None = None
        self._prefetcher: Prefetcher | None = None
        self._buffers: list[Buffer] = []
        self._packing = np.empty(0, np.uint8)
        self._is_closed = False
        self._link: LinkModel | None = None
        if config.is_modelled_link:
            self._link = LinkModel(config.link_gbps, config.link_latency_us)

    @property
    def bytes_buffered(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.data.numel() for buffer in self._buffers)

    @property
    def bytes_waiting(self) -> int:
        """Bytes fetched ahead that nobody has read yet."""
        return 0 if self._stream is None else self._stream.bytes_waiting

    @property
    def page_ids(self) -> Set[int]:
        """Pages that have a record."""
        return self._versions.keys()

    def __contains__(self, page_id: int) -> bool:
        return page_id in self._versions

    def check_open(self) -> None:
        """Raises `CacheMismatchError` after `close`."""
        if self._is_closed:
            raise CacheMismatchError(
                "this OVAL cache was closed: its page file is gone. Allowed: caches that are open. Use a new cache."
            )

    def store(self, pages: Sequence[Page], residency: Residency) -> None:
        """Writes pages that leave the pool; one whose record is as it is now is not written again.

        Raises:
            TierError: a page could not be written; those before it have records, all are still in the pool.
        """
        by_length: dict[int, list[Page]] = {}
        for page in pages:
            if self._versions.get(page.page_id) == page.version:
                continue
            self._drop(page.page_id)
            by_length.setdefault(len(page), []).append(page)
        for group in by_length.values():
            for start in range(0, len(group), _PACKED_PAGES):
                self._write(group[start : start + _PACKED_PAGES], residency)
        layout, _ = self._opened()
        self._counters.bytes_evicted += sum(len(page) for page in pages) * layout.token_bytes

    def begin(self, script: Sequence[Batch]) -> None:
        """Starts a forward that will read these batches."""
        if script and self._stream is None:
            self._stream = self._open_stream()
        if self._stream is not None:
            self._stream.begin(script)

    def expect(self, script: Sequence[Batch]) -> None:
        """Says what the next forward will most likely read, in place of what this one read."""
        if script and self._stream is None:
            self._stream = self._open_stream()
        if self._stream is not None:
            self._stream.expect(script)

    def approach(self, place: int) -> None:
        """Starts to fetch what should be fetched when this layer is next."""
        if self._stream is not None:
            self._stream.approach(place)

    def stream(self, place: int, batches: Sequence[Batch], asked: Asked) -> Generator[LayerStore]:
        """Yields K and V of a layer's batches in turn; each is valid until the next is asked for."""
        self.check_open()
        layout, _ = self._opened()
        if self._stream is None:  # nobody expected this layer to read of the slow tier
            self._stream = self._open_stream()
        shape, device = layout.shapes[place], self._device(place)
        with contextlib.closing(self._stream.read(batches, asked)) as arrived:
            for batch, buffer in arrived:
                chunk = buffer.data[: batch.num_tokens * shape.token_bytes]
                yield unpack(shape, chunk.to(device))

    def end(self) -> None:
        """Ends a forward; the next one is expected to read the same."""
        if self._stream is not None and not self._is_closed:
            self._stream.end()

    def read_page(self, page: Page) -> list[LayerStore]:
        """Returns K and V of a page in every tiered layer, on the CPU."""
        layout, store = self._opened()
        begin = time.perf_counter()
        record = torch.from_numpy(store.read_record(page.page_id))
        if self._link is not None:
            self._link.finish(self._link.start(record.numel()))
        self._counters.bytes_loaded += record.numel()
        self._counters.promotion_s += time.perf_counter() - begin
        if self._stream is not None:
            self._stream.forget({page.page_id})
        chunks = [record[layout.chunk(i, len(page))] for i in range(layout.num_layers)]
        return [unpack(shape, c) for shape, c in zip(layout.shapes, chunks, strict=True)]

    def read(
        self, layer_idx: int, page: Page, places: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K [K, n, D] and V [K, n, E] of a layer at these places of a page's tokens, by slot."""
        self.check_open()
        layout, store = self._opened()
        place = self._layers.index(layer_idx)
        shape = layout.shapes[place]
        out = np.empty(len(page) * shape.token_bytes, np.uint8)
        store.read(place, [page.page_id], Target(out, len(page)))
        found = unpack(shape, torch.from_numpy(out))
        index = torch.tensor(places, dtype=torch.long)
        device = self._device(place)
        return found.keys[:, index].to(device), found.values[:, index].to(device)

    def forget(self, page_ids: Set[int], everything: bool) -> None:
        """Drops the records of pages that ended; with `everything` gives the store's space back as well."""
        if self._stream is not None:
            self._stream.forget(page_ids)
            self._stream.count()
        for page_id in page_ids:
            self._drop(page_id)
        if everything and self._store is not None and not self._is_closed:
            self._store.clear()

    def copy_from(self, other: SlowTier) -> None:
        """Takes over copies of all records of another slow tier of the same shape."""
        other.check_open()
        if not other._versions:
            return
        layout, source = other._opened()
        _, store = self._opened()
        for page_id, version in other._versions.items():
            record = source.read_record(page_id)
            store.put(page_id, record.nbytes // layout.token_bytes, record)
            self._versions[page_id] = version

    def clear(self) -> None:
        """Drops every record and buffer; shapes are learnt anew."""
        self.rest()
        if self._store is not None:
            self._store.close()
        self._store, self._layout = None, None
        self._versions = {}

    def rest(self) -> None:
        """Ends the worker and gives the buffers back until the next forward."""
        if self._stream is not None:
            self._stream.drain()
        if self._prefetcher is not None:
            self._prefetcher.close()
        self._stream, self._prefetcher, self._buffers = None, None, []

    def close(self) -> None:
        """Ends the worker and gives files and memory back. Twice is harmless."""
        self.rest()
        if self._store is not None:
            self._store.close()
        self._is_closed = True

    def __del__(self) -> None:
        if self._prefetcher is not None and self._prefetcher.is_elsewhere:
            return  # a forked child: all of it is the parent's
        if self._prefetcher is not None and self._prefetcher.is_worker:
            self._prefetcher.close()  # collected by its own worker, which still reads the store
            return
        self.close()  # what waits unread counts as wasted

    def _write(self, pages: Sequence[Page], residency: Residency) -> None:
        layout, store = self._opened()
        count = len(pages[0])
        slots = [s + residency.shift(page) for page in pages for s in sorted(page.slots)]
        records = self._packing_space(len(pages), layout.token_bytes * count)
        for place, layer in enumerate(self._layers):
            keys, values = self._pool.read(layer, slots)
            records[:, layout.chunk(place, count)] = pack(len(pages), keys, values)
        for page, record in zip(pages, records, strict=True):
            store.put(page.page_id, count, record)
            self._versions[page.page_id] = page.version
            self._counters.bytes_stored += record.nbytes
        held = self._counters.peak_slow_bytes
        self._counters.peak_slow_bytes = max(held, store.bytes_stored)

    def _packing_space(self, num_pages: int, record_bytes: int) -> np.ndarray:
        # one piece of memory for all evictions: made anew each time, it would leave holes in the heap
        if self._packing.nbytes < num_pages * record_bytes:
            self._packing = np.empty(_PACKED_PAGES * record_bytes, np.uint8)
        return self._packing[: num_pages * record_bytes].reshape(num_pages, record_bytes)

    def _drop(self, page_id: int) -> None:
        if self._versions.pop(page_id, None) is not None and self._store is not None:
            self._store.drop(page_id)

    def _opened(self) -> tuple[RecordLayout, PageStore]:
        if self._layout is None or self._store is None:
            stores = [self._pool.store(layer) for layer in self._layers]
            self._layout = RecordLayout([LayerShape.of(s.keys, s.values) for s in stores])
            self._store = _create_store(self._config, self._layout, self._device(0))
        return self._layout, self._store

    def _open_stream(self) -> PageStream:
        layout, store = self._opened()
        device = self._device(0)
        widest = max(shape.token_bytes for shape in layout.shapes)
        num_bytes = self._memory.buffer_tokens * widest
        self._buffers = [Buffer(num_bytes, device) for _ in range(self._memory.num_buffers)]
        mover = create_mover(store, self._link, device, num_bytes)
        self._prefetcher = Prefetcher(mover, len(self._buffers) + 1)
        token_bytes = [shape.token_bytes for shape in layout.shapes]
        return PageStream(
            self._prefetcher,
            self._buffers,
            token_bytes,
            ORDERS[self._config.prefetch],
            self._counters,
        )

    def _device(self, place: int) -> torch.device:
        return self._pool.store(self._layers[place]).keys.device


def _create_store(config: TierConfig, layout: RecordLayout, device: torch.device) -> PageStore:
    pinned = device.type == "cuda"
    if config.disk is None:
        return HostStore(layout, pinned)
    disk = DiskStore(layout, folder_of(config.disk), config.direct_io)
    if not config.host_tokens:
        return disk
    return SpillStore(HostStore(layout, pinned), disk, config.host_tokens)
