"""Page files on a disk: how they are named, locked, found after a crash, and removed.

The process that uses a file holds a lock on it; the system drops the lock when the process ends, however it ends.
So a file whose lock can be taken is a leftover.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from oval_core.cache_folder import cache_dir
from oval_core.errors import ConfigError

if sys.platform != "win32":
    import fcntl

PREFIX = "oval-"
SUFFIX = ".pages"
_LIST_NAME = "page-folders.txt"
_MAX_LIST_BYTES = 16384


@dataclass(frozen=True, slots=True)
class Leftover:
    """A page file that no process uses: its size in bytes as the disk counts it."""

    path: Path
    num_bytes: int


def check_folder(folder: str) -> Path:
    """Returns the folder as an absolute path, made if it was missing; raises `ConfigError` if it cannot be written."""
    path = folder_of(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise ConfigError(
            f"tiers.disk: got {str(path)!r}, where no file can be written ({error.strerror}). Allowed: a folder that "
            "can. Name another one, or change its permissions."
        ) from error


def folder_of(folder: str) -> Path:
    """Returns the absolute path of a folder as a user names it."""
    return Path(folder).expanduser().absolute()


def create(folder: Path) -> tuple[int, Path]:
    """Makes an empty page file, locked, readable by its owner only; returns (file descriptor, path)."""
    _remember(folder)
    fd, name = tempfile.mkstemp(SUFFIX, f"{PREFIX}{os.getpid()}-", folder)  # mode 0600
    _lock(fd, wait=True)  # somebody who looks for leftovers may hold it for a moment
    return fd, Path(name)


def remove(fd: int, path: Path) -> None:
    """Removes a page file and closes it; one that somebody deleted is no error."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    os.close(fd)


def known_folders() -> list[Path]:
    """Returns the folders in which page files were ever made here and which still exist."""
    try:
        lines = (cache_dir() / _LIST_NAME).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [folder for folder in map(Path, dict.fromkeys(lines)) if folder.is_dir()]


def leftovers(folder: Path) -> list[Leftover]:
    """Returns the page files in a folder that no process uses."""
    return [found for path in _page_files(folder) if (found := _unused(path, delete=False))]


def clean(folder: Path) -> list[Leftover]:
    """Removes the page files in a folder that no process uses, and returns them."""
    return [found for path in _page_files(folder) if (found := _unused(path, delete=True))]


def _page_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{PREFIX}*{SUFFIX}"))


def _unused(path: Path, delete: bool) -> Leftover | None:
    try:
        fd = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return None  # gone meanwhile, or somebody else's
    try:
        if not _lock(fd, wait=False):
            return None
        stat = os.fstat(fd)
        if delete:
            path.unlink(missing_ok=True)
        return Leftover(path, getattr(stat, "st_blocks", stat.st_size // 512) * 512)
    finally:
        os.close(fd)


def _lock(fd: int, wait: bool) -> bool:
    if sys.platform == "win32":
        return False  # an open file cannot be removed there anyway
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _remember(folder: Path) -> None:
    # Only for `oval doctor`: a home that cannot be written must not stop a text.
    known = known_folders()
    if folder in known:
        return
    with contextlib.suppress(OSError):
        cache_dir().mkdir(parents=True, exist_ok=True)
        path = cache_dir() / _LIST_NAME
        if path.is_file() and path.stat().st_size > _MAX_LIST_BYTES:  # mostly folders long gone
            fresh = path.with_suffix(f".{os.getpid()}")
            fresh.write_text("".join(f"{name}\n" for name in known), encoding="utf-8")
            fresh.replace(path)
        with path.open("a", encoding="utf-8") as lines:
            lines.write(f"{folder}\n")
