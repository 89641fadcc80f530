"""The import direction: core <- mm, spec <- adapters <- cli, and transformers only in adapters.

Looks at the syntax tree, so imports inside functions and under TYPE_CHECKING count too, and so do
the `"package.module:Name"` strings of registries and `import_module("...")`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from policy.source_tree import PACKAGE_FOLDERS, ROOT, module_name, project_files, python_files

REGISTRY_STRING = re.compile(r"((?:oval_\w+|transformers)(?:\.\w+)*):\w+")
CLI = "oval_adapters.cli"
FORBIDDEN = {
    "oval_core": ("transformers", "oval_mm", "oval_spec", "oval_adapters"),
    "oval_mm": ("transformers", "oval_spec", "oval_adapters"),
    "oval_spec": ("transformers", "oval_mm", "oval_adapters"),
}


def imported_modules(source: str, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yields (line, absolute module name) of everything that `source` names for import.

    `from a import b` yields both `a` and `a.b`, since `b` may be a module.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, is_package=is_package)
            yield node.lineno, base
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _called_name(node) in ("import_module", "__import__"):
            if node.args and isinstance(node.args[0], ast.Constant):
                yield node.lineno, str(node.args[0].value)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and (match := REGISTRY_STRING.fullmatch(node.value))
        ):
            yield node.lineno, match[1]


def _absolute(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    drop = node.level - (1 if is_package else 0)
    base = parts[: len(parts) - drop]
    return ".".join([*base, node.module] if node.module else base)


def _called_name(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def offences(path: Path, banned: tuple[str, ...]) -> list[str]:
    """The imports of one file that fall under `banned`, as `file:line imports name`."""
    found = imported_modules(
        path.read_text(encoding="utf-8"), module_name(path), is_package=path.name == "__init__.py"
    )
    return sorted(
        {
            f"{path.relative_to(ROOT)}:{line} imports {name}"
            for line, name in found
            for package in banned
            if _is_within(name, package)
        }
    )


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_package_imports_only_what_lies_below_it(package: str) -> None:
    files = list(python_files(PACKAGE_FOLDERS[package]))
    assert files, f"no sources found for {package}"
    assert [o for path in files for o in offences(path, FORBIDDEN[package])] == []


def test_only_the_cli_and_its_tests_import_the_cli() -> None:
    outside = [
        path
        for path in project_files()
        if not _is_within(module_name(path), CLI) and not path.is_relative_to(ROOT / "tests")
    ]
    assert [o for path in outside for o in offences(path, (CLI,))] == []


@pytest.mark.parametrize(
    ("source", "module", "is_package", "expected"),
    [
        ("import transformers.cache_utils as c", "oval_core.a", False, "transformers.cache_utils"),
        ("def f():\n    from transformers import Cache", "oval_core.a", False, "transformers"),
        ("from . import cli", "oval_adapters", True, "oval_adapters.cli"),
        ("from ..cli import main", "oval_adapters.bench.a", False, "oval_adapters.cli"),
        ("from .cli.app import x", "oval_adapters.a", False, "oval_adapters.cli.app"),
        ("importlib.import_module('oval_mm')", "oval_spec.a", False, "oval_mm"),
        ("KINDS = {'a': 'oval_spec.tree:Tree'}", "oval_mm.a", False, "oval_spec.tree"),
    ],
)
def test_every_way_to_import_is_seen(
    source: str, module: str, is_package: bool, expected: str
) -> None:
    found = [name for _, name in imported_modules(source, module, is_package=is_package)]
    assert expected in found
