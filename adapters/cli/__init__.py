"""The command line. Importing it loads nothing heavy; `main` is the entry point of `oval`."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Runs the command `oval` and exits with its status."""
    from oval_adapters.cli.app import main as run

    run()
