"""Where OVAL keeps what it makes for later: models and compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "OVAL_CACHE"
DEFAULT_CACHE = "~/.cache/oval"


def cache_dir() -> Path:
    """Returns the cache folder as an absolute path; `OVAL_CACHE` overrides `~/.cache/oval`."""
    return Path(os.environ.get(CACHE_VARIABLE) or DEFAULT_CACHE).expanduser().absolute()
