"""A slow link, modelled: transfers take as long as a stated bandwidth and latency say. For experiments only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class LinkModel:
    """A link that moves one transfer at a time.

    Threads may share it. A transfer of n bytes keeps it busy for `latency_us` + n / `gbps`; transfers queue up behind each other. The real
    transfer runs meanwhile, so one that is slower than the model takes its own time.

    Attributes:
        gbps: GB/s, 1e9 bytes each.
        latency_us: microseconds a transfer.
        clock: seconds, for tests.
        sleep: waits for some seconds, for tests.
    """

    gbps: float | None
    latency_us: float = 0.0
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    _free_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def start(self, num_bytes: int) -> float:
        """Reserves the link for a transfer that starts now; returns the time at which it ends."""
        seconds = self.latency_us * 1e-6
        if self.gbps is not None:
            seconds += num_bytes / (self.gbps * 1e9)
        with self._lock:
            self._free_at = max(self.clock(), self._free_at) + seconds
            return self._free_at

    def finish(self, end: float) -> None:
        """Waits until that time has come."""
        left = end - self.clock()
        if left > 0:
            self.sleep(left)
