"""How well does a small LLaVA answer? Tables of scenes, a blanked control and real MMBench rows, by `oval eval mmbench`.

    python benchmarks/llava_accuracy.py --model smol-llava --tables TABLES --samples mmbench_samples.tsv --out FOLDER

TABLES is made by benchmarks/scene_tables.py. A second start goes on where the first was cut off. The last line of stdout is
JSON: for each table what `oval eval mmbench --json` says, without its lists.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from oval_adapters.bench.machine import machine, versions

LEFT_OUT = ("failures", "rules", "by_split", "by_l2_category")


def main() -> None:
    """Asks what is left to ask, then prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smol-llava")
    parser.add_argument(
        "--tables", type=Path, required=True, help="folder with known, never_seen and albums, .tsv"
    )
    parser.add_argument("--samples", type=Path, help="real rows of MMBench")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", nargs="*", help="some of the runs, to share them among processes")
    options = parser.parse_args()
    runs: dict[str, list[str]] = {
        "known": ["--data", str(options.tables / "known.tsv"), "--circular"],
        "never_seen": ["--data", str(options.tables / "never_seen.tsv"), "--circular"],
        "albums": ["--data", str(options.tables / "albums.tsv"), "--vanilla"],
        "blank": ["--data", str(options.tables / "known.tsv"), "--vanilla", "--blank-images"],
    }
    if options.samples is not None:
        runs["mmbench_samples"] = ["--data", str(options.samples)]
    wanted = {name: run for name, run in runs.items() if not options.only or name in options.only}
    results = {name: _ask(options, name, run) for name, run in wanted.items()}
    print(
        json.dumps(
            {
                "tables": results,
                "model": options.model,
                "dtype": options.dtype,
                "versions": versions(),
                "machine": machine(torch.device("cpu")),
            }
        )
    )


def _ask(options: argparse.Namespace, name: str, run: list[str]) -> dict[str, Any]:
    """Returns what one evaluation says."""
    argv = ["eval", "mmbench", "--model", options.model, "--dtype", options.dtype, *run]
    argv += ["--out", str(options.out / name), "--resume", "--json"]
    command = [sys.executable, "-c", "from oval_adapters.cli import main; main()", *argv]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    values = json.loads(printed.strip().splitlines()[-1])
    return {key: value for key, value in values.items() if key not in LEFT_OUT}


if __name__ == "__main__":
    main()
