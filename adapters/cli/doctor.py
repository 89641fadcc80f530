"""`oval doctor`: what this machine can run, and why not. Changes nothing, unless told to clean."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Annotated, Any

import typer

DISTRIBUTION = "oval-pack"
SHOWN_PACKAGES = (DISTRIBUTION, "torch", "transformers")
LOW_MEMORY_GB = 2.0


def register(app: typer.Typer) -> None:
    """Adds the command `doctor`."""
    app.command("doctor")(doctor_command)


def doctor_command(
    disk: Annotated[
        list[str] | None,
        typer.Option(metavar="FOLDER", help="Look for page files there too; may be repeated."),
    ] = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove page files that no process uses any more.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, last on stdout.")
    ] = False,
) -> None:
    """Show versions, attention backends, processors, memory, the embedded models, and page files left behind."""
    from rich.console import Console

    console = Console(stderr=as_json)
    with Console(stderr=True).status("looking at torch and the backends"):
        report = create_report(disk or (), clean)
    _show(console, report)
    if as_json:
        typer.echo(json.dumps(report))


def create_report(disks: Sequence[str] = (), clean: bool = False) -> dict[str, Any]:
    """Returns everything that the command shows, as JSON values.

    Args:
        disks: folders to look for page files in, beside those that are known.
        clean: remove the page files that no process uses.
    """
    import psutil
    import torch

    from oval_adapters.bench.machine import usable_cores
    from oval_adapters.cli.models import status_row
    from oval_adapters.cli.page_folders import leftover_warnings, look
    from oval_adapters.models import list_models
    from oval_core.attention import backend_report
    from oval_core.cache_folder import cache_dir
    from oval_core.native import load_kernels, unavailable_reason

    folders, problems = look(disks, clean)
    memory = psutil.virtual_memory()
    report: dict[str, Any] = {
        "versions": {"python": platform.python_version()} | _versions(),
        "backends": [
            {"name": name, "ok": ok, "reason": reason} for name, ok, reason in backend_report()
        ],
        "linear_kernel": unavailable_reason() or load_kernels(64, 1).linear_path,
        "cpu": {
            "threads": torch.get_num_threads(),
            "cores": usable_cores(),
            "busy": round(psutil.cpu_percent(interval=0.3) / 100 * usable_cores(), 1),
        },
        "memory_gb": {
            "total": round(memory.total / 1e9, 2),
            "available": round(memory.available / 1e9, 2),
        },
        "cuda": [_cuda_device(index) for index in range(torch.cuda.device_count())],
        "cache_dir": str(cache_dir()),
        "models": [status_row(status) for status in list_models()],
        "page_files": folders,
    }
    return report | {"warnings": [*_warnings(report), *leftover_warnings(folders), *problems]}


def _versions() -> dict[str, str]:
    found = {}
    for name in SHOWN_PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _cuda_device(index: int) -> dict[str, Any]:
    import torch

    facts = torch.cuda.get_device_properties(index)
    return {
        "name": facts.name,
        "memory_gb": round(facts.total_memory / 1e9, 2),
        "capability": f"{facts.major}.{facts.minor}",
    }


def _warnings(report: dict[str, Any]) -> Iterator[str]:
    yield from requirement_warnings()
    if not any(backend["ok"] for backend in report["backends"]):
        yield "no attention backend can run: see the reasons above"
    threads, cores = report["cpu"]["threads"], report["cpu"]["cores"]
    if threads > cores:
        yield f"torch uses {threads} threads on {cores} cores: set OMP_NUM_THREADS={cores}"
    busy = report["cpu"]["busy"]
    if busy > cores / 2:
        yield (
            f"other programs keep {busy} of {cores} cores busy: decoding on a CPU waits for all its threads and "
            "may be many times slower; wait, or set OMP_NUM_THREADS=1"
        )
    available = report["memory_gb"]["available"]
    if available < LOW_MEMORY_GB:
        yield f"{available} GB memory available, the embedded model needs {LOW_MEMORY_GB} GB"
    yield from (model["problem"] for model in report["models"] if model["problem"])


def requirement_warnings() -> Iterator[str]:
    """Yields a line per installed package whose version is outside the range that we declare."""
    from packaging.requirements import Requirement

    try:
        declared = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        yield f"{DISTRIBUTION} is not installed, so versions are not checked: install it with pip"
        return
    for requirement in map(Requirement, declared):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue  # belongs to an extra
        wanted = f"{requirement.name}{requirement.specifier}"
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield f'{requirement.name} is not installed: pip install "{wanted}"'
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield (
                f"{requirement.name} {version} is outside the supported range "
                f'{requirement.specifier}: pip install "{wanted}"'
            )


def _show(console: Any, report: dict[str, Any]) -> None:
    from rich.table import Table

    from oval_adapters.cli.page_folders import table_cells

    table = Table(show_header=False, title="oval doctor", title_justify="left")
    for name, version in report["versions"].items():
        table.add_row(name, version)
    for backend in report["backends"]:
        state = "can run" if backend["ok"] else "cannot run"
        table.add_row(f"backend {backend['name']}", f"{state}: {backend['reason']}")
    table.add_row("linear layers", f"bf16 kernel: {report['linear_kernel']}")
    cpu, memory = report["cpu"], report["memory_gb"]
    table.add_row("processor", f"{cpu['threads']} threads on {cpu['cores']} cores")
    table.add_row("memory", f"{memory['available']} GB available of {memory['total']} GB")
    for device in report["cuda"] or [None]:
        table.add_row("cuda", "none" if device is None else _device_line(device))
    table.add_row("cache folder", report["cache_dir"])
    for model in report["models"]:
        table.add_row(f"model {model['name']}", model["state"])
    for cell in table_cells(report["page_files"]):
        table.add_row("page files", cell)
    console.print(table, markup=False)
    for row in report["page_files"]:
        for file in row["leftovers"] if row["removed"] else ():
            console.print(f"removed {file['path']}", markup=False, highlight=False, soft_wrap=True)
    for warning in report["warnings"]:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    if not report["warnings"]:
        console.print("no warnings", style="green")


def _device_line(device: dict[str, Any]) -> str:
    return f"{device['name']}, {device['memory_gb']} GB, capability {device['capability']}"
