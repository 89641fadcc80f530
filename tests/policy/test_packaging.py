"""The wheel: every package in it, nothing else at top level, and configs that load outside the checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from policy.source_tree import (
    PACKAGE_FOLDERS,
    ROOT,
    TOP_PACKAGES,
    declared_packages,
    module_name,
    python_files,
)

BUILD_INPUTS = ("oval_core", "oval_mm", "oval_spec", "adapters", "assets", "configs")

LOAD_OUTSIDE = """
import importlib.resources, pathlib, sys
target = pathlib.Path(sys.argv[1]).resolve()
import oval_adapters, oval_core, oval_mm, oval_spec
for module in (oval_adapters, oval_core, oval_mm, oval_spec):
    path = pathlib.Path(module.__file__).resolve()
    assert path.is_relative_to(target), f"{path} is not the installed copy under {target}"
files = importlib.resources.files("oval_adapters.configs")
assert pathlib.Path(str(files)).resolve().is_relative_to(target), str(files)
for name in sys.argv[2:]:
    assert files.joinpath(name + ".yaml").is_file(), name
    print(type(oval_adapters.load_config(name)).__name__)
"""


def config_names(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).with_suffix("").as_posix() for p in folder.rglob("*.yaml"))


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, so that no old build output of the checkout gets into it."""
    source = tmp_path_factory.mktemp("source")
    for name in BUILD_INPUTS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", out)
    run(sys.executable, "-m", "pip", "wheel", *options, source)
    (path,) = out.glob("*.whl")
    return path


def test_package_list_equals_the_folders() -> None:
    inits = {
        module_name(p)
        for folder in PACKAGE_FOLDERS.values()
        for p in python_files(folder)
        if p.name == "__init__.py"
    }
    assert sorted(declared_packages()) == sorted(inits)


def test_every_source_folder_is_a_package() -> None:
    orphans = {
        str(p.parent.relative_to(ROOT))
        for folder in PACKAGE_FOLDERS.values()
        for p in python_files(folder)
        if not (p.parent / "__init__.py").exists()
    }
    assert not orphans, f"folders with sources but no __init__.py do not ship: {orphans}"


@pytest.mark.parametrize("package", TOP_PACKAGES)
def test_package_is_marked_as_typed(package: str) -> None:
    assert (PACKAGE_FOLDERS[package] / "py.typed").is_file()


@pytest.mark.slow
def test_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    info = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
    assert {name.split("/")[0] for name in names} == {*TOP_PACKAGES, info}
    sources = {
        f"{module_name(folder / '__init__.py').replace('.', '/')}/{p.relative_to(folder)}"
        for folder in PACKAGE_FOLDERS.values()
        for p in python_files(folder)
    }
    assert {name for name in names if name.endswith(".py")} == sources
    assert {f"{package}/py.typed" for package in TOP_PACKAGES} <= set(names)
    assert f"{info}/entry_points.txt" in names


@pytest.mark.slow
def test_wheel_holds_every_config(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    configs = config_names(ROOT / "configs")
    assert configs
    assert {f"oval_adapters/configs/{name}.yaml" for name in configs} <= names


@pytest.mark.slow
def test_configs_load_from_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    options = ("--no-deps", "--no-index", "-q", "--target", target)
    run(sys.executable, "-m", "pip", "install", *options, wheel)
    names = config_names(ROOT / "configs")
    environment = os.environ | {"PYTHONPATH": str(target)}
    command = (sys.executable, "-c", LOAD_OUTSIDE, target, *names)
    assert run(*command, cwd=elsewhere, env=environment).split() == ["OvalConfig"] * len(names)
