"""Every YAML in configs/ says in its first line what it is for, and loads by its name."""

from pathlib import Path

import pytest
from policy.source_tree import ROOT

CONFIGS = ROOT / "configs"
FILES = sorted(CONFIGS.rglob("*.y*ml"))


def config_name(path: Path) -> str:
    return path.relative_to(CONFIGS).with_suffix("").as_posix()


def test_there_are_configs() -> None:
    assert FILES, "configs/ holds no YAML"
    assert [p.name for p in FILES if p.suffix != ".yaml"] == [], "only *.yaml ships in the wheel"


@pytest.mark.parametrize("path", FILES, ids=config_name)
def test_first_line_says_what_for(path: Path) -> None:
    first, *_ = path.read_text(encoding="utf-8").splitlines() or [""]
    assert first.startswith("# "), f"{path.name}: the first line must be a comment, got {first!r}"
    assert len(first.removeprefix("# ").split()) >= 3, f"{path.name}: says too little: {first!r}"


@pytest.mark.parametrize("path", FILES, ids=config_name)
def test_loads_by_name(path: Path) -> None:
    from oval_adapters import load_config

    by_name = load_config(config_name(path))
    assert by_name == load_config(path)
    assert type(by_name).__name__ == "OvalConfig"
