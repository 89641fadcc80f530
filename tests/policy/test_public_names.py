"""`__all__` of every package: present, sorted, without doubles, and each name is really there."""

import importlib
import re

import pytest
from policy.source_tree import TOP_PACKAGES, declared_packages


def isort_key(name: str) -> tuple[int, list[tuple[int, int, str]]]:
    """Ruff's RUF022 order: CONSTANTS, then Classes, then the rest; digits compare as numbers."""
    kind = 0 if len(name) > 1 and name.isupper() else 1 if name[:1].isupper() else 2
    parts = [part for part in re.split(r"(\d+)", name) if part]
    return kind, [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in parts]


@pytest.mark.parametrize("package", TOP_PACKAGES)
def test_outer_packages_say_what_is_public(package: str) -> None:
    assert isinstance(importlib.import_module(package).__all__, list)


@pytest.mark.parametrize("package", declared_packages())
def test_public_names_are_sorted_and_resolve(package: str) -> None:
    module = importlib.import_module(package)
    names = getattr(module, "__all__", [])  # an inner package may publish nothing
    expected = sorted(set(names), key=isort_key)
    assert names == expected, f"{package}.__all__ is not sorted or has doubles"
    missing = [name for name in names if not hasattr(module, name)]
    assert not missing, f"{package}.__all__ names what is not there: {missing}"


def test_order_is_the_one_ruff_asks_for() -> None:
    names = ["attach", "OvalCache", "TIERS", "AttentionBackend", "Page10", "Page2"]
    expected = ["TIERS", "AttentionBackend", "OvalCache", "Page2", "Page10", "attach"]
    assert sorted(names, key=isort_key) == expected
