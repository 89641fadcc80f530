"""Compiles C for this processor, once, into the cache folder.

The library's name holds a digest of the source, the compiler, the flags and the processor: a cache folder that
several machines share never hands one the code of another.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from oval_core.cache_folder import cache_dir
from oval_core.errors import BackendUnavailableError

_FLAGS = (
    "-O3",
    "-march=native",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
)
# Sums may be reordered, so that they run in vectors. Never -ffast-math: linking with it turns off subnormal numbers for
# the whole process.
_REORDER_FLAGS = ("-fno-signed-zeros", "-fassociative-math")
_GCC_FLAGS = (  # several sums side by side: 1.5 times as fast here; other compilers do it unasked
    "-funroll-loops",
    "-fvariable-expansion-in-unroller",
    "--param",
    "max-variable-expansions-in-unroller=4",
)
_TIMEOUT_S = 120

_ABI = 4
"""Raised here and in the sources with every change of a C function's arguments: a process that was started before an
upgrade must not call code of after it."""


def build_library(name: str, defines: Mapping[str, int], exact: bool = False) -> Path:
    """Returns the compiled library.

    Args:
        name: of the source beside this file, without `.c`.
        defines: macros to set.
        exact: sums keep the order that the source gives them.
    Raises:
        BackendUnavailableError: no compiler, a compiler that fails, or a cache folder that is not safe to load from.
    """
    compiler = _find_compiler()
    source, headers = _sources(name)
    settings = [f"-D{macro}={value}" for macro, value in {**defines, "ABI": _ABI}.items()]
    version = _run([compiler, "--version"]).stdout
    by_gcc = _GCC_FLAGS if "Free Software Foundation" in version else ()
    flags = (*_FLAGS, *(() if exact else (*_REORDER_FLAGS, *by_gcc)), *settings)
    parts = (source, *headers.values(), version, *flags, platform.machine(), _processor())
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    folder = _safe_folder()
    library = folder / "-".join([name, *map(str, defines.values()), f"{digest}.so"])
    if library.is_file():
        return library
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source_file, made = Path(scratch) / f"{name}.c", Path(scratch) / f"{name}.so"
        source_file.write_text(source, encoding="utf-8")
        for header, text in headers.items():
            (Path(scratch) / header).write_text(text, encoding="utf-8")
        done = _run([compiler, *flags, str(source_file), "-o", str(made), "-lm"])
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise BackendUnavailableError(f"{compiler} failed: {lines[0]}")
        os.replace(made, library)  # noqa: PTH105 - atomic, and says so
    return library


def _sources(name: str) -> tuple[str, dict[str, str]]:
    """Returns a source and the headers beside it, by name, that it and they include."""
    folder = resources.files("oval_core.native")
    source = (folder / f"{name}.c").read_text(encoding="utf-8")
    headers: dict[str, str] = {}
    unread = [source]
    while unread:
        for header in re.findall(r'^#include "(\w+\.h)"', unread.pop(), re.MULTILINE):
            if header not in headers:
                headers[header] = (folder / header).read_text(encoding="utf-8")
                unread.append(headers[header])
    return source, headers


def _find_compiler() -> str:
    if platform.system() == "Windows":
        raise BackendUnavailableError("no C compiler is supported on Windows")
    chosen = os.environ.get("CC")
    for name in (chosen,) if chosen else ("cc", "gcc", "clang"):
        found = shutil.which(name)
        if found:
            return found
    raise BackendUnavailableError(f"no C compiler found ({chosen or 'cc, gcc or clang'})")


def _run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendUnavailableError(f"{argv[0]} cannot run: {error}") from error


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        return "".join(
            sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))})
        )
    return platform.processor()


def _safe_folder() -> Path:
    """Returns the folder of compiled code: code is loaded from it, so nobody else may write there."""
    folder = cache_dir() / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError as error:
        raise BackendUnavailableError(f"cannot use {folder}: {error}") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise BackendUnavailableError(
            f"{folder} belongs to or is writable by others, so no code is loaded from it (chmod 700 it, or set "
            "OVAL_CACHE)"
        )
    return folder
