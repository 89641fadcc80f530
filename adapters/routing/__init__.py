"""Routing on Hugging Face models: recording what a passage's attention does, to judge and train routers on it."""

from __future__ import annotations

from oval_adapters.routing.recorder import RecordOptions, record

__all__ = ["RecordOptions", "record"]
