"""Does memory grow with the text? A process of its own for each length, everything in memory and on tiers.

    python benchmarks/tier_memory.py --model smol --context 2048,4096,8192 --fast-tokens 1024 --disk FOLDER

The last line of stdout is JSON: growth of the process's memory, at its peak, over prefill and decode.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from typing import Any

CHUNK = 256
"""Tokens a forward of the prefill: what one forward takes for itself is the same for every length."""

STEPS = 16


def main() -> None:
    """Starts a process a row, or is one."""
    parser = argparse.ArgumentParser(description="Peak memory by length of the text.")
    parser.add_argument("--model", default="smol")
    parser.add_argument("--context", default="2048,4096,8192")
    parser.add_argument("--fast-tokens", type=int, default=1024)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--row", choices=("resident", "tiers"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row is not None:
        print(json.dumps(measure(options)))
        return
    rows = []
    for context in options.context.split(","):
        for row in ("resident", "tiers"):
            argv = [sys.executable, __file__, "--model", options.model, "--dtype", options.dtype]
            argv += ["--fast-tokens", str(options.fast_tokens), "--disk", options.disk]
            argv += ["--context", context, "--row", row]
            done = subprocess.run(argv, check=True, capture_output=True, text=True)
            rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
            print(rows[-1], file=sys.stderr)
    print(json.dumps(describe(options, rows)))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Prefills and decodes once; returns what memory did."""
    import torch

    from oval_adapters import attach
    from oval_adapters.bench.memory import MemoryMeter
    from oval_adapters.load_model import load_model
    from oval_core import OvalConfig

    model = load_model(options.model, options.dtype, "cpu")
    context = int(options.context)
    prompt = min(context, model.config.max_position_embeddings - STEPS)
    ids = torch.randint(
        model.config.vocab_size, (1, prompt), generator=torch.Generator().manual_seed(0)
    )
    tiers = {"fast_tokens": options.fast_tokens, "disk": options.disk}
    config = OvalConfig.from_dict({} if options.row == "resident" else {"tiers": tiers})
    meter = MemoryMeter(model.device)
    with attach(model, config) as oval, torch.no_grad():
        model(ids[:, :CHUNK], cache=oval.new_cache(), use_cache=True, logits_to_keep=1)  # warm up
        meter.start()
        cache = oval.new_cache(prompt + STEPS)
        for chunk in [*ids.split(CHUNK, 1), *ids[:, :STEPS].split(1, 1)]:
            model(chunk, cache=cache, use_cache=True, logits_to_keep=1)
        row = {
            "context": context,
            "where": options.row,
            "peak_mb": round(meter.peak_mb(), 1),
            "fast_mb": round(cache.paged.bytes_allocated / 1e6, 1),
            "slow_mb": round(oval.counters.tiers.peak_slow_bytes / 1e6, 1),
        }
        cache.close()
    return row


def describe(options: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Puts rows and the circumstances of their measurement together."""
    import torch

    from oval_adapters.bench.machine import machine, versions

    return {
        "rows": rows,
        "model": options.model,
        "dtype": options.dtype,
        "fast_tokens": options.fast_tokens,
        "chunk": CHUNK,
        "versions": versions(),
        "machine": machine(torch.device("cpu")),
    }


if __name__ == "__main__":
    main()
