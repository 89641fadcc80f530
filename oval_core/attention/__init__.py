"""Attention over the pool. Backends execute a plan; they do not choose what is read."""

from __future__ import annotations

import importlib

import torch

from oval_core.attention.base import AttentionBackend
from oval_core.errors import BackendUnavailableError, ConfigError, did_you_mean

__all__ = ["AttentionBackend", "backend_report", "create_backend", "resolve_backend"]

_BACKENDS = {
    "native": "oval_core.attention.native:NativeBackend",
    "reference": "oval_core.attention.reference:ReferenceBackend",
    "sdpa": "oval_core.attention.sdpa:SdpaBackend",
    "torch": "oval_core.attention.torch_backend:TorchBackend",
}


def create_backend(
    name: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> AttentionBackend:
    """Returns the backend of this name; `auto` is resolved for the device and dtype of the model first.

    Raises:
        ConfigError: no backend has this name.
        BackendUnavailableError: the backend was asked for by name and cannot run here.
    """
    name = resolve_backend(name, device, dtype)
    backend = _load(name)
    reason = backend.unavailable_reason()
    if reason is not None:
        raise BackendUnavailableError(
            f"attention backend {name!r} cannot run here: {reason}. "
            "Allowed: auto, or a backend that `oval doctor` lists as ready."
        )
    return backend


def resolve_backend(
    name: str, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> str:
    """Returns the backend that `auto` stands for on this device and dtype, or `name` itself."""
    if name == "auto":
        if torch.device(device).type != "cpu":
            return "sdpa"
        is_native = dtype == torch.bfloat16 and _load("native").unavailable_reason() is None
        return "native" if is_native else "torch"
    if name not in _BACKENDS:
        raise ConfigError(f"backend: got {name!r}; {did_you_mean(name, [*_BACKENDS, 'auto'])}")
    return name


def backend_report() -> list[tuple[str, bool, str]]:
    """Returns (name, can run, remark) for every backend."""
    rows = []
    for name in sorted(_BACKENDS):
        backend = _load(name)
        reason = backend.unavailable_reason()
        rows.append((name, reason is None, reason or backend.description))
    return rows


def _load(name: str) -> AttentionBackend:
    module, _, cls = _BACKENDS[name].partition(":")
    backend: AttentionBackend = getattr(importlib.import_module(module), cls)()
    return backend
