"""What do dynamic page sizes cost? Time and peak memory of a sizer on random hidden states of a text of each length.

    python benchmarks/page_sizing.py --tokens 2048,8192,32768 --hidden-size 576

The last line of stdout is JSON. A process of its own for each length, so that no length inherits another's memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

DTYPES = ("bfloat16", "float32")


def main() -> None:
    """Starts a process a length, or is one."""
    parser = argparse.ArgumentParser(description="Time and memory of dynamic page sizes by length.")
    parser.add_argument("--tokens", default="2048,4096,8192,16384,32768")
    parser.add_argument("--hidden-size", type=int, default=576)
    parser.add_argument("--mean-size", type=int, default=16)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--row", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(measure(options)))
        return
    rows = []
    for tokens in options.tokens.split(","):
        argv = [sys.executable, __file__, "--row", "--tokens", tokens, "--dtype", options.dtype]
        argv += ["--hidden-size", str(options.hidden_size), "--mean-size", str(options.mean_size)]
        argv += ["--repeats", str(options.repeats), "--threads", str(options.threads)]
        done = subprocess.run(argv, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
        print(rows[-1], file=sys.stderr)
    print(json.dumps(describe(options, rows)))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Sizes one text several times; returns the median time, and the peak of memory beside the hidden states."""
    import torch

    from oval_adapters.bench.memory import MemoryMeter
    from oval_core.routing.page_sizer import DynamicPageSizer

    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    tokens = int(options.tokens)
    hidden = torch.randn(tokens, options.hidden_size, generator=generator)
    hidden = hidden.to(getattr(torch, options.dtype))
    sizer = DynamicPageSizer(options.hidden_size, options.mean_size)
    sizer.head.weight.data = torch.randn(1, options.hidden_size, generator=generator) / 24
    sizer(hidden[:256])  # warm up
    meter = MemoryMeter(hidden.device)
    meter.start()
    sizes = sizer(hidden)
    peak = meter.peak_mb()
    times = []
    for _ in range(options.repeats):
        start = time.perf_counter()
        sizer(hidden)
        times.append(1e3 * (time.perf_counter() - start))
    ms = statistics.median(times)
    return {
        "tokens": tokens,
        "pages": len(sizes),
        "ms": round(ms, 2),
        "ms_min": round(min(times), 2),
        "ms_max": round(max(times), 2),
        "peak_mb": round(peak, 1),
        "ms_per_1k": round(1024 * ms / tokens, 3),
    }


def describe(options: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Puts rows and the circumstances of their measurement together."""
    import torch

    from oval_adapters.bench.machine import machine, versions

    return {
        "rows": rows,
        "hidden_size": options.hidden_size,
        "mean_size": options.mean_size,
        "dtype": options.dtype,
        "threads": options.threads,
        "repeats": options.repeats,
        "versions": versions(),
        "machine": machine(torch.device("cpu")),
    }


if __name__ == "__main__":
    main()
