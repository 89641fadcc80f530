"""The list of a built model's files with their sizes and digests, and the check against it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

MANIFEST_FILE = "manifest.json"
MANIFEST_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFacts:
    """Size and digest of one file."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a build wrote, and from which source file."""

    source_sha256: str
    dtype: str
    files: Mapping[str, FileFacts]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files, the manifest itself not counted."""
        return sum(facts.size for facts in self.files.values())


class ManifestError(ValueError):
    """A manifest is missing or unreadable; the message starts with its file name."""


def file_sha256(path: Path) -> str:
    """Returns the digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, source_sha256: str, dtype: str) -> None:
    """Measures every file in `folder` and writes the manifest; nothing may change afterwards."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(folder.iterdir())
    }
    content = {
        "format": MANIFEST_FORMAT,
        "source_sha256": source_sha256,
        "dtype": dtype,
        "files": files,
    }
    (folder / MANIFEST_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Reads what `write_manifest` wrote.

    Raises:
        ManifestError: the file is missing, cut off, or not of this format.
    """
    path = folder / MANIFEST_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != MANIFEST_FORMAT:
            raise ManifestError(
                f"{MANIFEST_FILE} has format {content['format']!r}, expected {MANIFEST_FORMAT}"
            )
        files = {
            Path(name).name: FileFacts(size=int(facts["size"]), sha256=str(facts["sha256"]))
            for name, facts in content["files"].items()
        }
        return Manifest(
            source_sha256=str(content["source_sha256"]), dtype=str(content["dtype"]), files=files
        )
    except FileNotFoundError as error:
        raise ManifestError(f"{MANIFEST_FILE} is missing") from error
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ManifestError(f"{MANIFEST_FILE} is cut off or damaged ({error})") from error


def file_problems(folder: Path, manifest: Manifest, *, deep: bool) -> list[str]:
    """Returns one line per file that differs from the manifest; an empty list if all is well.

    Args:
        folder: the built model.
        manifest: what should be there.
        deep: also compute every digest; without it only existence and sizes are looked at.
    """
    found = (_problem(folder / name, facts, deep) for name, facts in manifest.files.items())
    return [problem for problem in found if problem is not None]


def _problem(path: Path, facts: FileFacts, deep: bool) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing, expected {facts.size:,} bytes"
    size = path.stat().st_size
    if size != facts.size:
        return f"{path.name} has {size:,} bytes, expected {facts.size:,}"
    if deep and (sha256 := file_sha256(path)) != facts.sha256:
        return f"{path.name} has sha256 {sha256}, expected {facts.sha256}"
    return None
