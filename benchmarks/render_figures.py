"""Writes measured tables into README.md and docs/, between `<!-- figures:NAME -->` marks, from benchmarks/records/NAME.json.

Records are the last stdout line of a command, kept with the command itself:

    python benchmarks/render_figures.py record decode oval bench decode --model smol --json
    python benchmarks/render_figures.py record --output FILE heads oval train medusa ...    # a long run that is over
    python benchmarks/render_figures.py render
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from claims import render_claims
from image_figures import IMAGES
from llava_figures import LLAVA
from routing_figures import FROM, ROUTING
from speculation_figures import SPECULATION

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "records"
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "claims.md",
    ROOT / "docs" / "decisions.md",
    ROOT / "docs" / "images.md",
    ROOT / "docs" / "speculation.md",
)


def main() -> None:
    """Runs `record` or `render`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="run a command and keep its result")
    record.add_argument("name", choices=sorted(RENDERERS))
    record.add_argument("--output", type=Path, help="what the command printed; it is not run again")
    record.add_argument("argv", nargs=argparse.REMAINDER)
    commands.add_parser("render", help="write the tables into the pages")
    arguments = parser.parse_args()
    if arguments.command == "record":
        keep_record(arguments.name, arguments.argv, arguments.output)
    for page in PAGES:
        render(page)


def keep_record(name: str, argv: list[str], output: Path | None = None) -> None:
    """Runs a command and keeps its JSON, the command and the commit."""
    if output is None:
        printed = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout
    else:
        printed = output.read_text(encoding="utf-8")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    result = _without_places(json.loads(printed.strip().splitlines()[-1]))
    command = shlex.join(argv).replace(f"{ROOT}/", "")  # no place of this machine
    record = {"command": command, "commit": commit.stdout.strip(), "result": result}
    RECORDS.mkdir(parents=True, exist_ok=True)
    (RECORDS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _without_places(value: Any) -> Any:
    """Returns a result whose absolute paths are cut to their last part: a record tells no place of a machine."""
    if isinstance(value, dict):
        return {key: _without_places(own) for key, own in value.items()}
    if isinstance(value, list):
        return [_without_places(own) for own in value]
    is_place = isinstance(value, str) and "\n" not in value and Path(value).is_absolute()
    return Path(value).name if is_place else value


def render(page: Path) -> None:
    """Replaces the marked parts of a page by tables made from the records."""
    text = page.read_text(encoding="utf-8")
    text = _put(text, "claims", render_claims(RECORDS))
    for name, renderer in RENDERERS.items():
        path = RECORDS / f"{FROM.get(name, name)}.json"
        if path.is_file():
            record = json.loads(path.read_text(encoding="utf-8"))
            table = renderer(record["result"]) + "\n" + _source(record)
            text = _put(text, name, table)
    page.write_text(text, encoding="utf-8")


def _put(text: str, name: str, table: str) -> str:
    pattern = rf"(<!-- figures:{name} -->\n).*?(<!-- /figures:{name} -->)"
    return re.sub(pattern, lambda m: f"{m[1]}{table}\n{m[2]}", text, flags=re.DOTALL)


def render_decode(result: dict[str, Any]) -> str:
    """Returns the table of a decode benchmark."""
    lines = [
        "| context | Hugging Face, ms a token (p99) | OVAL, ms a token (p99) | ratio | prefill, s | peak memory, MB |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['context']} | {row['hf_ms_p50']:.1f} ({row['hf_ms_p99']:.1f}) "
            f"| {row['oval_ms_p50']:.1f} ({row['oval_ms_p99']:.1f}) | **{row['ratio']:.2f}** "
            f"| {row['hf_prefill_s']:.1f} / {row['oval_prefill_s']:.1f} "
            f"| {row['hf_rss_mb']:.0f} / {row['oval_rss_mb']:.0f} |"
        )
    return "\n".join(lines)


def render_parity(result: dict[str, Any]) -> str:
    """Returns the summary of a parity run."""
    rows = result["rows"]
    worst = max(row["max_logit_diff"] for row in rows if row["max_logit_diff"] is not None)
    tokens = sum(row["new_tokens"] for row in rows)
    return (
        f"  {result['identical']} of {len(rows)} cases token-identical in {result['dtype']} "
        f"({tokens} steps: chat, code, a 2k-token document, batches, beams, sampling); largest logit "
        f"difference {worst:.1e}."
    )


def render_forms(result: dict[str, Any]) -> str:
    """Returns the table of benchmarks/decode_forms.py."""
    lines = ["| what | form | fastest, ms | median, ms |", "|---|---|---|---|"]
    lines += [
        f"| {row['what']} | {row['form']} | {row['ms_min']} | {row['ms_p50']} |"
        for row in result["rows"]
    ]
    return "\n".join(lines)


def render_prefetch(result: dict[str, Any]) -> str:
    """Returns the table of a prefetch benchmark."""
    steps = result["steps"]
    lines = [
        "| fast memory | order of prefetch | ms a token | computing | transfer | waiting | MB a token | total / max | tokens |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        ms = [row[name] / steps * 1e3 for name in ("total_s", "compute_s", "transfer_s", "stall_s")]
        moved = (row["bytes_used"] + row["bytes_demanded"]) / steps / 1e6
        lines.append(
            f"| {row['fast_fraction']:.0%} | {row['order']} | **{ms[0]:.0f}** | {ms[1]:.0f} | {ms[2]:.0f} "
            f"| {ms[3]:.0f} | {moved:.0f} | {row['ratio']:.2f} | {'identical' if row['identical'] else 'differ'} |"
        )
    resident = result["rows"][0]["resident_s"] / steps * 1e3
    lines.append(
        f"\n  Everything in memory: {resident:.0f} ms a token. Link: {result['rows'][0]['link']}."
    )
    return "\n".join(lines)


def render_tier_memory(result: dict[str, Any]) -> str:
    """Returns the table of benchmarks/tier_memory.py."""
    lines = [
        "| context | in memory, MB | on tiers, MB | of it pages and buffers, MB |",
        "|---|---|---|---|",
    ]
    by_place = {(row["context"], row["where"]): row for row in result["rows"]}
    for context in dict.fromkeys(row["context"] for row in result["rows"]):
        resident, tiers = by_place[context, "resident"], by_place[context, "tiers"]
        lines.append(
            f"| {context} | {resident['peak_mb']:.0f} | {tiers['peak_mb']:.0f} | {tiers['fast_mb']:.0f} |"
        )
    return "\n".join(lines)


RENDERERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "decode": render_decode,
    "forms": render_forms,
    "parity": render_parity,
    "prefetch": render_prefetch,
    "prefetch_disk": render_prefetch,
    "tier_memory": render_tier_memory,
    **ROUTING,
    **SPECULATION,
    **IMAGES,
    **LLAVA,
}


def _source(record: dict[str, Any]) -> str:
    result = record["result"]
    machine, versions = result["machine"], result["versions"]
    return (
        f"\n  <sub>`{record['command']}`, {result.get('model', 'smol')}, {result.get('dtype', 'bfloat16')}, {machine['cpu']}, "
        f"{machine['cores']} cores, torch {versions['torch']}, transformers {versions['transformers']}, "
        f"commit {record['commit']}.</sub>\n"
    )


if __name__ == "__main__":
    main()
