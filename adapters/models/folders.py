"""Folders of the model cache: where they are, who may write, how a finished one is published."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from oval_adapters.models.errors import CacheFolderError
from oval_core.cache_folder import CACHE_VARIABLE, cache_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def downloads_dir() -> Path:
    """Returns the folder of fetched packages; it may not exist yet."""
    return cache_dir() / "downloads"


def models_dir() -> Path:
    """Returns the folder that holds one folder per built model; it may not exist yet."""
    return cache_dir() / "models"


@contextmanager
def cache_errors() -> Iterator[None]:
    """Turns failures of the file system into `CacheFolderError` with the way out."""
    try:
        yield
    except OSError as error:
        raise CacheFolderError(
            f"cannot use the cache folder {cache_dir()}: {error}. It must be a writable folder "
            f"with free space: mend it, or set {CACHE_VARIABLE} to another folder."
        ) from error


def prepare_cache(needed_bytes: int) -> None:
    """Makes the cache folders and checks that a build fits on the disk.

    Raises:
        CacheFolderError: a folder cannot be made, or less than `needed_bytes` are free.
    """
    with cache_errors():
        for folder in (downloads_dir(), models_dir()):
            folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(models_dir()).free
    if free < needed_bytes:
        raise CacheFolderError(
            f"too little space in {cache_dir()}: {free / 1e6:,.0f} MB free, the build needs "
            f"{needed_bytes / 1e6:,.0f} MB. Free some, or set {CACHE_VARIABLE} to another folder."
        )


@contextmanager
def build_lock(name: str, on_wait: Callable[[], None]) -> Iterator[None]:
    """Holds the lock of one model's build, across processes.

    The system drops the lock when its process ends, however it ends. The lock file stays: deleting
    it would let a third process lock a new file while a second still waits for the old one.

    Args:
        name: the model.
        on_wait: called once if another process holds the lock.
    """
    import fcntl  # not on every system; only building needs it

    with cache_errors():
        file = (models_dir() / f".{name}.lock").open("a")
    with file:
        with cache_errors():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def staging_dir(name: str) -> Iterator[Path]:
    """Gives an empty folder on the built models' file system, removed at the end.

    Call it under the model's lock: what an earlier, killed build left behind is removed first.
    """
    prefix = f".build-{name}-"
    with cache_errors():
        for leftover in models_dir().glob(f"{prefix}*"):
            shutil.rmtree(leftover)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=models_dir()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def publish(finished: Path, name: str) -> Path:
    """Moves a finished folder to the model's place and returns it; an older one is replaced.

    A reader finds the old folder, for an instant none, then the new one; never a half-written one.

    Args:
        finished: a folder inside the staging folder, which also takes the older one.
        name: the model.
    """
    target = models_dir() / name
    with cache_errors():
        if target.exists():
            target.rename(finished.with_name("replaced"))
        finished.rename(target)
    return target
