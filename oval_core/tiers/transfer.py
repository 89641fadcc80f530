"""One move of bytes from a slow tier into a buffer of fast memory, and who makes it on a CPU and on CUDA."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from oval_core.native.chunk_io import Target
from oval_core.tiers.link import LinkModel
from oval_core.tiers.page_store import PageStore


@dataclass(frozen=True, slots=True)
class Batch:
    """Pages that one layer reads together: one transfer, one call of attention.

    Attributes:
        layer: the layer's place among the tiered layers.
        page_ids: the pages, in the order in which their tokens lie in the buffer.
        counts: tokens of each.
    """

    layer: int
    page_ids: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all pages."""
        return sum(self.counts)

    @property
    def key(self) -> tuple[int, tuple[int, ...]]:
        """What makes two batches the same: pages that ended and changed have new ids."""
        return self.layer, self.page_ids


class Buffer:
    """A piece of fast memory that one transfer fills at a time."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.read_until: torch.cuda.Event | None = None
        """On CUDA: until when the last reader's kernels run."""

    def released(self) -> None:
        """Notes that everything that reads the buffer has been launched."""
        if self.data.is_cuda:
            self.read_until = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.read_until.record(torch.cuda.current_stream(self.data.device))


class State(enum.Enum):
    """queued -> running -> done, or queued -> cancelled."""

    QUEUED = enum.auto()
    RUNNING = enum.auto()
    DONE = enum.auto()
    CANCELLED = enum.auto()


class Transfer:
    """A batch on its way into a buffer. Its state changes under the prefetcher's lock only."""

    __slots__ = (
        "ahead", "batch", "buffer", "done_at", "error", "home", "num_bytes", "priority", "state"
    )  # fmt: skip

    def __init__(self, batch: Batch, buffer: Buffer, num_bytes: int, priority: float, ahead: bool):
        self.batch = batch
        self.buffer = buffer
        self.num_bytes = num_bytes
        self.priority = priority
        self.ahead = ahead
        self.state = State.QUEUED
        self.error: BaseException | None = None
        self.done_at = 0.0
        self.home: object = None
        """What queued it; in a forked child that is lost."""


class Mover:
    """Reads batches into buffers of main memory."""

    def __init__(self, store: PageStore, link: LinkModel | None) -> None:
        self._store = store
        self._link = link

    def __call__(self, transfer: Transfer) -> None:
        """Makes a transfer; under a modelled link it takes as long as that says."""
        end = None if self._link is None else self._link.start(transfer.num_bytes)
        self._move(transfer)
        if self._link is not None and end is not None:
            self._link.finish(end)

    def _move(self, transfer: Transfer) -> None:
        self._read(transfer.batch, transfer.buffer.data.numpy())

    def _read(self, batch: Batch, out: np.ndarray) -> None:
        self._store.read(batch.layer, batch.page_ids, Target(out, batch.num_tokens))


class CudaMover(Mover):
    """Reads batches through pinned memory into buffers on a GPU, on a stream of its own."""

    def __init__(
        self,
        store: PageStore,
        link: LinkModel | None,
        device: torch.device,
        num_bytes: int,
    ) -> None:
        super().__init__(store, link)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def _move(self, transfer: Transfer) -> None:
        self._read(transfer.batch, self._pinned.numpy())
        buffer = transfer.buffer
        with torch.cuda.stream(self._stream):
            if buffer.read_until is not None:
                self._stream.wait_event(buffer.read_until)
            buffer.data[: transfer.num_bytes].copy_(
                self._pinned[: transfer.num_bytes], non_blocking=True
            )
        # The worker waits, so that a transfer that is done may be read on any stream.
        self._stream.synchronize()


def create_mover(
    store: PageStore, link: LinkModel | None, device: torch.device, num_bytes: int
) -> Callable[[Transfer], None]:
    """Returns what moves batches into buffers of `num_bytes` on this device."""
    if device.type == "cuda":
        return CudaMover(store, link, device, num_bytes)
    return Mover(store, link)
