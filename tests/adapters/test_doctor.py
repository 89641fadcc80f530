"""`oval doctor`: the report's content, and what it warns about."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_model
import pytest
import torch
from typer.testing import CliRunner

from oval_adapters.cli.app import create_app
from oval_adapters.cli.doctor import create_report, requirement_warnings
from oval_adapters.models import build_model
from oval_core.tiers import page_files
from oval_core.tiers.disk_store import DiskStore
from oval_core.tiers.record import LayerShape, RecordLayout

HOLD_A_STORE = """
import sys
from pathlib import Path

import numpy as np
import torch

from oval_core.tiers.disk_store import DiskStore
from oval_core.tiers.record import LayerShape, RecordLayout

layout = RecordLayout([LayerShape(1, 8, 8, torch.float32)])
store = DiskStore(layout, Path(sys.argv[1]), False)
store.put(1, 16, np.zeros(16 * layout.token_bytes, np.uint8))
print(store.path, flush=True)
sys.stdin.read()
"""
BACKENDS = [("torch", True, "always"), ("flash", False, "flash-attn is not installed")]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    monkeypatch.setattr("oval_core.attention.backend_report", lambda: BACKENDS)
    return fake_model.setup(monkeypatch, tmp_path)


def test_json_holds_the_whole_report(tiny: SimpleNamespace) -> None:
    result = CliRunner().invoke(create_app(), ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert set(report["versions"]) == {"python", "torch", "transformers", "oval-pack"}
    assert report["backends"][1] == {
        "name": "flash",
        "ok": False,
        "reason": "flash-attn is not installed",
    }
    assert report["cpu"]["threads"] >= 1
    assert report["cpu"]["cores"] >= 1
    assert 0 < report["memory_gb"]["available"] <= report["memory_gb"]["total"]
    assert report["cache_dir"] == str(tiny.cache)
    assert [model["state"] for model in report["models"]] == ["not built"]
    # Looking changes nothing, but that kernels are compiled to see whether they can be.
    assert {path.name for path in tiny.cache.glob("*")} <= {"kernels"}


def test_table_says_why_a_backend_cannot_run(tiny: SimpleNamespace) -> None:
    result = CliRunner().invoke(create_app(), ["doctor"])
    assert result.exit_code == 0, result.output
    assert "flash-attn is not installed" in result.stdout
    assert "not built" in result.stdout


def test_a_broken_model_is_a_warning(tiny: SimpleNamespace) -> None:
    build_model("tiny", wheel=tiny.wheel, reporter=tiny.log)
    (tiny.folder / "config.json").unlink()
    report = create_report()
    assert report["models"][0]["state"] == "broken"
    assert any("config.json is missing" in warning for warning in report["warnings"])


def test_no_backend_at_all_is_a_warning(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oval_core.attention.backend_report", lambda: BACKENDS[1:])
    assert any("no attention backend" in warning for warning in create_report()["warnings"])


def test_versions_out_of_range_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = ["torch>=1", "transformers<5", "no-such-thing>1", 'flash-attn; extra == "cuda"']
    monkeypatch.setattr(metadata, "requires", lambda name: declared)
    first, second = requirement_warnings()
    assert first.startswith("transformers ")
    assert 'outside the supported range <5: pip install "transformers<5"' in first
    assert second == 'no-such-thing is not installed: pip install "no-such-thing>1"'


def test_an_uninstalled_checkout_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    (warning,) = requirement_warnings()
    assert "oval-pack is not installed" in warning


def killed_holder(folder: Path) -> Path:
    """Returns the page file of a process that was killed while it used it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_A_STORE, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        path = Path(process.stdout.readline().strip())
        process.kill()
    return path


def leave(folder: Path) -> Path:
    """Makes a page file that no process holds, in a folder that was never heard of."""
    path = folder / f"{page_files.PREFIX}1-left{page_files.SUFFIX}"
    path.write_bytes(bytes(5000))
    return path


def doctor(*arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(create_app(), ["doctor", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_page_files_left_behind_are_found_and_removed(
    tiny: SimpleNamespace, tmp_path: Path
) -> None:
    folder = tmp_path / "page files"
    folder.mkdir()
    left = killed_holder(folder)  # it also wrote down the folder, in the cache of `tiny`
    layout = RecordLayout([LayerShape(1, 8, 8, torch.float32)])
    used = DiskStore(layout, folder, direct_io=False)
    (folder / "notes.txt").write_text("somebody's", encoding="utf-8")
    size = left.stat().st_blocks * 512

    report = doctor()
    files = [{"path": str(left), "bytes": size}]
    assert report["page_files"] == [{"folder": str(folder), "leftovers": files, "removed": False}]
    (warning,) = [line for line in report["warnings"] if "page file" in line]
    assert f"oval doctor --clean --disk '{folder}'" in warning
    assert left.exists()  # looking changes nothing

    result = CliRunner().invoke(create_app(), ["doctor", "--clean"])
    assert result.exit_code == 0, result.output
    assert f"removed {left}" in result.stdout.replace("\n", "")
    assert not left.exists()
    assert used.path.exists()
    assert (folder / "notes.txt").exists()
    used.close()
    assert doctor("--clean")["page_files"] == [
        {"folder": str(folder), "leftovers": [], "removed": False}
    ]


def test_doctor_looks_into_more_folders(tiny: SimpleNamespace, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    left = leave(folders[1])
    assert doctor()["page_files"] == []
    call = [word for folder in (*folders, folders[0]) for word in ("--disk", folder)]
    rows = doctor(*call)["page_files"]
    assert [(row["folder"], len(row["leftovers"])) for row in rows] == [
        (str(folders[0]), 0),
        (str(folders[1]), 1),
    ]
    shown = CliRunner().invoke(create_app(), ["doctor", *map(str, call)]).stdout
    assert "1 folder without leftovers" in shown
    rows = doctor("--clean", *call)["page_files"]
    assert [row["removed"] for row in rows] == [False, True]
    assert rows[1]["leftovers"][0]["path"] == str(left)
    assert not left.exists()
    assert not tiny.cache.exists()


def test_a_folder_that_is_not_there_is_an_error(tiny: SimpleNamespace, tmp_path: Path) -> None:
    result = CliRunner().invoke(create_app(), ["doctor", "--disk", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "which is no folder" in result.stderr
    assert not (tmp_path / "none").exists()


def test_a_page_file_that_cannot_be_removed_is_a_warning(
    tiny: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = leave(tmp_path)

    def refused(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        report = doctor("--clean", "--disk", tmp_path)
    assert [row["removed"] for row in report["page_files"]] == [False]
    assert any("could not be removed: Permission denied" in w for w in report["warnings"])
    assert left.exists()
