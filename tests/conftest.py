"""What every test shares: a fixed number of torch threads, a seed, and the skip for missing CUDA."""

import os
from pathlib import Path

import pytest
import torch

from oval_core.cache_folder import cache_dir
from oval_core.tiers import page_files

requires_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs CUDA: torch.cuda.is_available() is False"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips, with the reason, every test marked `gpu` where there is no CUDA."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(requires_cuda)


@pytest.fixture(scope="session", autouse=True)
def _torch_threads() -> None:
    """Sets the thread count once: figures and sums must not depend on the machine's core count."""
    shared = "PYTEST_XDIST_WORKER" in os.environ  # the cores are shared out already
    torch.set_num_threads(1 if shared else min(2, os.cpu_count() or 1))


@pytest.fixture(autouse=True)
def _no_trace_at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The list of folders with page files belongs to the user; tests keep one of their own."""
    home = cache_dir()
    mine = tmp_path.parent / f"{tmp_path.name}-home"
    # a test that sets OVAL_CACHE means that one
    monkeypatch.setattr(
        page_files, "cache_dir", lambda: mine if cache_dir() == home else cache_dir()
    )


@pytest.fixture(autouse=True)
def _seed(_torch_threads: None) -> None:
    torch.manual_seed(0)
