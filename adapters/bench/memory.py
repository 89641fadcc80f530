"""Peak memory of one phase: of the process on a CPU, of torch's allocator on CUDA."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import psutil
import torch

_PROC = Path("/proc/self")
_RESET_PEAK = "5"  # what Linux wants written to clear_refs to forget the peak of resident memory


class MemoryMeter:
    """Growth of memory between `start` and `peak_mb`.

    On Linux the kernel keeps the peak, so short-lived tensors count. Elsewhere the peak is the largest
    value at a call of `sample`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = self._largest = 0
        self._kernel_counts = False

    def start(self) -> None:
        """Forgets the past: freed memory goes back to the system, counting begins at what is left."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            self._base = torch.cuda.memory_allocated(self._device)
            return
        _return_freed_memory()
        self._kernel_counts = _reset_kernel_peak()
        self._base = self._largest = psutil.Process().memory_info().rss

    def sample(self) -> None:
        """Looks at the memory now; call it outside of what is timed."""
        if self._device.type == "cpu" and not self._kernel_counts:
            self._largest = max(self._largest, psutil.Process().memory_info().rss)

    def peak_mb(self) -> float:
        """Returns the peak since `start`, above what was in use then, in MB (10^6 bytes)."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
        else:
            self.sample()
            peak = _kernel_peak() if self._kernel_counts else self._largest
        return max(0, peak - self._base) / 1e6


def _return_freed_memory() -> None:
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, others may not
        if trim is not None:
            trim(0)


def _reset_kernel_peak() -> bool:
    try:
        (_PROC / "clear_refs").write_text(_RESET_PEAK, encoding="ascii")
    except OSError:  # not Linux, or not allowed
        return False
    return _kernel_peak() > 0


def _kernel_peak() -> int:
    for line in (_PROC / "status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
