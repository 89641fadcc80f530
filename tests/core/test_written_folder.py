"""The JSON file of a folder that OVAL wrote: read as it is, or refused with what to do; every such folder is read by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from oval_core.errors import ConfigError
from oval_core.routing.checkpoint import load_router
from oval_core.written_folder import read_facts
from oval_mm.fusion_checkpoint import load_fusion
from oval_spec.heads.facts import BaseFacts
from oval_spec.layouts.own import load_own

BASE = BaseFacts(model_type="llama", hidden_size=8, vocab_size=16)


def read(folder: Path, written_by: str | None = None) -> dict[str, object]:
    return read_facts(
        folder, "thing", config="a.json", weights="a.bin", form="a-1", written_by=written_by
    )


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"format": "a-1", "x": [1, "\u00e9"]}', encoding="utf-8")
    assert read(tmp_path) == {"format": "a-1", "x": [1, "\u00e9"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            None,
            r"^thing .*: a.json cannot be read \(.*Allowed: a folder with a.json and a.bin\. Name",
        ),
        ("{", r"a.json cannot be read \(Expecting"),
        ("[]", r"^thing .*: got format 'list'\. Allowed: 'a-1'\. Use a folder"),
        ("{}", "got format None"),
        ('{"format": "a-2"}', "got format 'a-2'"),
        ("\ud800", "cannot be read"),
    ],
)
def test_other_files_are_refused(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "a.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError, match=message):
        read(tmp_path)


def test_a_command_that_writes_them_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="a.json and a.bin, as `oval make a` writes it. Name such"
    ):
        read(tmp_path, "oval make a")


@pytest.mark.parametrize(
    ("load", "name", "message"),
    [
        (
            load_router,
            "oval_config.json",
            "router .*oval_adapter.safetensors, as `oval train router`",
        ),
        (load_fusion, "oval_fusion.json", "fusion router .*oval_fusion.safetensors. Name"),
        (lambda f: load_own(f, BASE), "oval_heads.json", "heads .*as `oval train medusa`"),
    ],
)
def test_every_reader_says_the_same(
    load: Callable[[Path], object], name: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{name} cannot be read.*"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)
    (tmp_path / name).write_text('{"format": "of-another-time"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="got format 'of-another-time'. Allowed: 'oval-"):
        load(tmp_path)
