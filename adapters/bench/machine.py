"""What a measurement was made on and with: versions, processor, cores. Never the machine's name."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("oval-pack", "torch", "transformers")


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages whose code was measured."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine(device: torch.device) -> dict[str, Any]:
    """Returns the processor's name, the usable cores and, on CUDA, the GPU's name."""
    facts: dict[str, Any] = {"cpu": _cpu_name(), "cores": usable_cores()}
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


def usable_cores() -> int:
    """Returns how many cores this process may use."""
    affinity = hasattr(os, "sched_getaffinity")  # macOS and Windows have no affinity mask
    return len(os.sched_getaffinity(0)) if affinity else os.cpu_count() or 1


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
