"""What every test shares: a fixed number of torch threads, a seed, and the skip for missing CUDA."""

import os

import pytest
import torch

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
    torch.set_num_threads(min(2, os.cpu_count() or 1))


@pytest.fixture(autouse=True)
def _no_trace_at_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The list of folders with page files belongs to the user; tests keep one of their own."""
    home = tmp_path_factory.getbasetemp() / "oval-home"
    monkeypatch.setattr(page_files, "cache_dir", lambda: home)


@pytest.fixture(autouse=True)
def _seed(_torch_threads: None) -> None:
    torch.manual_seed(0)
