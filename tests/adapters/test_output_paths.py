"""Where commands write: paths that take no file are refused by name before anything is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from oval_adapters.cli import output_paths
from oval_adapters.cli.output_paths import check_output_file, check_output_folder, write_page
from oval_core.errors import ConfigError


def test_paths_that_take_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.html").write_text("old", encoding="utf-8")
    for name in ("new.html", "old.html"):
        check_output_file("html", Path(name))
        check_output_file("html", tmp_path / name)
    for name in (".", "new", "new/inner"):
        check_output_folder("out", Path(name))
    assert [path.name for path in tmp_path.iterdir()] == ["old.html"]
    assert (tmp_path / "old.html").read_text(encoding="utf-8") == "old"


@pytest.mark.parametrize(
    ("name", "word"), [(".", "a folder"), ("none/a.html", "no folder none"), ("f/a.html", "no folder f")]
)  # fmt: skip
def test_paths_that_take_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").touch()
    with pytest.raises(ConfigError, match=f"html: .*{word}"):
        check_output_file("html", Path(name))


def test_a_folder_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    for path in (tmp_path / "f", tmp_path / "f" / "run"):
        with pytest.raises(ConfigError, match="out: got .*is a file"):
            check_output_folder("out", path)


def test_what_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, so the answer of the system is made here."""
    monkeypatch.setattr(output_paths.os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(ConfigError, match="html: .*cannot be written"):
        check_output_file("html", tmp_path / "a.html")
    with pytest.raises(ConfigError, match="out: .*is locked"):
        check_output_folder("out", tmp_path / "run")


def test_a_page_that_the_disk_does_not_take(tmp_path: Path) -> None:
    write_page("html", tmp_path / "a.html", "a \ud800 b")
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == "a &#55296; b"
    with pytest.raises(ConfigError, match="html: cannot write"):
        write_page("html", tmp_path, "a")
