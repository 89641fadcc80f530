"""`oval doctor`: the report's content, and what it warns about."""

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import fake_model
import pytest
from typer.testing import CliRunner

from oval_adapters.cli.app import create_app
from oval_adapters.cli.doctor import create_report, requirement_warnings
from oval_adapters.models import build_model

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
    assert not tiny.cache.exists()  # looking changes nothing


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
