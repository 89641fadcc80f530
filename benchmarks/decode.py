"""Decode time of Hugging Face and OVAL in one process: python benchmarks/decode.py --model smol --context 1024,4096

What `oval bench decode --json` measures, without the command line's table. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys

from oval_adapters.bench.decode import describe, measure_decode
from oval_adapters.bench.values import DecodeSettings
from oval_adapters.load_model import load_model


def main() -> None:
    """Measures the contexts one after the other."""
    default = DecodeSettings()
    parser = argparse.ArgumentParser(description="Decode time of Hugging Face and OVAL.")
    parser.add_argument("--model", default="smol", help="smol, a folder or a hub id")
    parser.add_argument("--context", default=",".join(map(str, default.contexts)))
    parser.add_argument("--dtype", default="bfloat16")
    for name in ("steps", "warmup", "rounds", "chunk"):
        parser.add_argument(f"--{name}", type=int, default=getattr(default, name))
    options = parser.parse_args()
    settings = DecodeSettings(
        contexts=tuple(int(part) for part in options.context.split(",")),
        steps=options.steps,
        warmup=options.warmup,
        rounds=options.rounds,
        chunk=options.chunk,
    )
    model = load_model(options.model, options.dtype, attention="sdpa")
    rows = []
    for row in measure_decode(model, settings):
        print(row, file=sys.stderr)
        rows.append(row)
    print(json.dumps(describe(options.model, model, settings, rows).to_dict()))


if __name__ == "__main__":
    main()
