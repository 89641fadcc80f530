"""What `oval doctor` says of page files: folders, files that a killed process left, and their removal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def look(more: Sequence[str], clean: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Looks into the folders in which page files were ever made here, and into some more.

    Args:
        more: folders.
        clean: also remove what no process uses.
    Returns:
        A row a folder, as JSON values, and what went wrong, a line each.
    Raises:
        ConfigError: one of `more` is no folder.
    """
    from oval_core.tiers.page_files import known_folders

    folders = dict.fromkeys([*known_folders(), *map(_checked, more)])
    rows, problems = [], []
    for folder in folders:
        row, problem = _look_into(folder, clean)
        rows.append(row)
        problems += problem
    return rows, problems


def leftover_warnings(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields a line for each folder in which something is left."""
    for row in rows:
        if row["leftovers"] and not row["removed"]:
            yield (
                f"{row['folder']} holds {_amount(row['leftovers'])} that no process uses: remove with "
                f"oval doctor --clean --disk {shlex.quote(row['folder'])}"
            )


def table_cells(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields what a table says: of each folder with leftovers, and how many have none."""
    with_some = [row for row in rows if row["leftovers"]]
    for row in with_some:
        state = "removed" if row["removed"] else "left over:"
        yield f"{row['folder']}: {state} {_amount(row['leftovers'])}"
    count = len(rows) - len(with_some)
    if count:
        yield f"{count} folder{'' if count == 1 else 's'} without leftovers"


def _checked(name: str) -> Path:
    from oval_core.errors import ConfigError

    folder = Path(name).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(
            f"disk: got {name!r}, which is no folder. Allowed: an existing one. Check the path."
        )
    return folder


def _look_into(folder: Path, clean: bool) -> tuple[dict[str, Any], list[str]]:
    from oval_core.tiers import page_files

    problems = []
    found = page_files.leftovers(folder)
    removed = False
    if clean and found:
        try:
            found, removed = page_files.clean(folder), True
        except OSError as error:
            problems = [f"{folder}: a page file could not be removed: {error.strerror}"]
            found = page_files.leftovers(folder)
    files = [{"path": str(file.path), "bytes": file.num_bytes} for file in found]
    return {"folder": str(folder), "leftovers": files, "removed": removed and bool(files)}, problems


def _amount(leftovers: Sequence[dict[str, Any]]) -> str:
    size = sum(file["bytes"] for file in leftovers) / 1e6
    return f"{len(leftovers)} page file{'' if len(leftovers) == 1 else 's'} of {size:.1f} MB"
