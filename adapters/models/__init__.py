"""Embedded models: real weights from a package registry, no model hub needed."""

from __future__ import annotations

from oval_adapters.models.build import build_model
from oval_adapters.models.resolve import resolve_model
from oval_adapters.models.store import list_models, model_path

__all__ = ["build_model", "list_models", "model_path", "resolve_model"]
