"""What is faster in C, compiled on this machine when first needed. Without a compiler everything still runs."""

from __future__ import annotations

from oval_core.native.kernels import Kernels, load_kernels, unavailable_reason

__all__ = ["Kernels", "load_kernels", "unavailable_reason"]
