"""Files and functions stay small, and names say what a file owns."""

import ast
import re
from pathlib import Path

import pytest
from policy.source_tree import ROOT, project_files

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
NAMELESS = {"utils", "util", "helpers", "helper"}
VERSION_SUFFIX = re.compile(r"_(new|old|legacy|v\d+)$")


def long_functions(source: str) -> list[str]:
    """`name:line (lines)` of every function over the cap, counted from `def` to its last line."""
    lengths = [
        (node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return [f"{name}:{line} ({n})" for name, line, n in lengths if n > MAX_FUNCTION_LINES]


def bad_names(relative: Path) -> list[str]:
    """The parts of a path that say nothing (`utils`) or say a version (`router_v2`)."""
    parts = relative.with_suffix("").parts
    return [part for part in parts if part in NAMELESS or VERSION_SUFFIX.search(part)]


def test_no_file_is_too_long() -> None:
    lengths = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in project_files()}
    assert len(lengths) > 5, "no sources found"
    too_long = {str(p.relative_to(ROOT)): n for p, n in lengths.items() if n > MAX_FILE_LINES}
    assert not too_long, f"over {MAX_FILE_LINES} lines; look for a missing noun: {too_long}"


def test_no_function_is_too_long() -> None:
    found = {
        str(p.relative_to(ROOT)): long_functions(p.read_text(encoding="utf-8"))
        for p in project_files()
    }
    assert {p: names for p, names in found.items() if names} == {}


def test_names_say_what_a_file_owns() -> None:
    relative = [path.relative_to(ROOT) for path in project_files()]
    assert [str(path) for path in relative if bad_names(path)] == []


@pytest.mark.parametrize(
    "name", ["oval_core/utils.py", "oval_core/helpers/a.py", "adapters/cache_v2.py", "a_legacy.py"]
)
def test_a_bad_name_is_found(name: str) -> None:
    assert bad_names(Path(name))


def test_a_long_function_is_found() -> None:
    body = "\n".join(["    pass"] * MAX_FUNCTION_LINES)
    assert long_functions(f"class A:\n  def f():\n{body}") == [f"f:2 ({MAX_FUNCTION_LINES + 1})"]
    assert not long_functions("def f():\n" + "\n".join(["    pass"] * (MAX_FUNCTION_LINES - 1)))
