"""Where the project's sources are. Knows folders and names, not what the rules about them say."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# import name -> folder; the first three keep their name when installed
PACKAGE_FOLDERS = {
    "oval_core": ROOT / "oval_core",
    "oval_mm": ROOT / "oval_mm",
    "oval_spec": ROOT / "oval_spec",
    "oval_adapters": ROOT / "adapters",
    "oval_adapters.assets": ROOT / "assets",
    "oval_adapters.configs": ROOT / "configs",
}
TOP_PACKAGES = ("oval_adapters", "oval_core", "oval_mm", "oval_spec")
UNSHIPPED_FOLDERS = ("tests", "examples", "benchmarks")


def python_files(folder: Path) -> Iterator[Path]:
    """Every .py file below `folder`, in a stable order; none if the folder does not exist."""
    yield from sorted(p for p in folder.rglob("*.py") if "__pycache__" not in p.parts)


def project_files() -> Iterator[Path]:
    """Every .py file of the project, shipped or not."""
    for folder in PACKAGE_FOLDERS.values():
        yield from python_files(folder)
    for name in UNSHIPPED_FOLDERS:
        yield from python_files(ROOT / name)


def module_name(path: Path) -> str:
    """The dotted name a file is imported by (`adapters/cli/app.py` -> `oval_adapters.cli.app`)."""
    for package, folder in PACKAGE_FOLDERS.items():
        if path.is_relative_to(folder):
            parts = path.relative_to(folder).with_suffix("").parts
            return ".".join([package, *parts]).removesuffix(".__init__")
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def declared_packages() -> list[str]:
    """The `packages` list of pyproject.toml."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["tool"]["setuptools"]["packages"]
