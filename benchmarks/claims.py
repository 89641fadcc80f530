"""The claims of the idea's source beside what was measured: one table, made from all records. Called by render_figures.py."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from image_figures import judged_at

Result = dict[str, Any]


def render_claims(records: Path) -> str:
    """Returns the table; a claim whose record is missing says so."""
    lines = ["| the article says | measured here | so |", "|---|---|---|"]
    for claim, name, measure in CLAIMS:
        path = records / f"{name}.json"
        if not path.is_file():
            lines.append(f"| {claim} | no record yet | open |")
            continue
        measured, verdict = measure(json.loads(path.read_text(encoding="utf-8"))["result"])
        lines.append(f"| {claim} | {measured} | {verdict} |")
    lines += [f"| {claim} | not built yet | open |" for claim in LATER]
    return "\n".join(lines)


def _coverage(result: Result) -> tuple[str, str]:
    rows = [
        row
        for row in result["rows"]
        if row["signal"].startswith("oval-") and row["kind"] == "mean" and row["lead"] == 1
    ]
    cells = []
    for budget in sorted({row["budget"] for row in rows}):
        own = [row for row in rows if row["budget"] == budget]
        mass = statistics.fmean(row["mass_recall"] for row in own)
        heavy = statistics.fmean(row["heavy_page_recall"] for row in own)
        cells.append(f"{budget:.0%}: {mass:.1%} of the mass, {heavy:.1%} of pages with 5 % or more")
    text = "; ".join(cells)
    return f"learned router, closed loop, by budget: {text}", "not with four pages; see the budgets"


def _cost(result: Result) -> tuple[str, str]:
    ratio = result["router_flops"] / result["decoder_flops"]
    within = ratio <= 0.0017 and result["p99_ms"] < 0.3
    return (
        f"router alone {ratio:.2%} of the decoder's operations, with key signals {result['flops_ratio']:.2%}; whole selection p99 "
        f"{result['p99_ms']:.1f} ms on one CPU thread, {result['settings']['pages']} pages",
        "holds"
        if within
        else "does not hold here: a 135M decoder is small, and one CPU thread slow",
    )


def _locality(result: Result) -> tuple[str, str]:
    def recall(name: str) -> float:
        return next(
            float(row["mass_recall"])
            for row in result["rows"]
            if (row["signal"], row["kind"], row["lead"], row["budget"])
            == (name, "retrieval", 1, 0.2)
        )

    steps = ("content", "content + decay", "content + decay + graph", "all but graph")
    values = [recall(name) for name in steps]
    whole = recall("all, with key signals")
    gain = values[2] - values[0]
    return (
        f"retrieval, mass recall at 20 %: content {values[0]:.3f}, + decay {values[1]:.3f}, + graph {values[2]:.3f}; the whole "
        f"router {whole:.3f}, without graph {values[3]:.3f}",
        f"locality adds {100 * gain:.1f} points to content alone; next to history and sketches the graph adds "
        f"{100 * (whole - values[3]):.1f}",
    )


def _sizes(result: Result) -> tuple[str, str]:
    row = next(row for row in result["rows"] if row["sizing"] == "dynamic trained")
    sizes = row["histogram"]  # pages by range of tokens
    total = sum(sizes.values())
    mid = (sizes["9-12"] + sizes["13-16"]) / total
    small = sizes["1-4"] / total
    two = mid > 0.5 and small > 0.1
    return (
        f"`dynamic` on SmolLM2: {mid:.0%} of the pages have 9 to 16 tokens, {small:.0%} have 1 to 4",
        "two peaks" if two else "no two peaks",
    )


def _speed(result: Result) -> tuple[str, str]:
    row = max(result["rows"], key=lambda row: row["context"])
    tail = row["oval_ms_p99"] / row["hf_ms_p99"]
    return (
        f"exact decode at {row['context']} tokens takes {row['ratio']:.2f} of Hugging Face's time, p99 {tail:.2f}",
        "holds as a ratio, without any selection",
    )


def _loss(result: Result) -> tuple[str, str]:
    rows = [
        row
        for row in result["decode"]
        if row["signal"].startswith("oval-") and row["kind"] == "text"
    ]
    cells = []
    for policy in ("routed", "guarded"):
        for budget in sorted({row["budget"] for row in rows}):
            own = [r for r in rows if r["policy"] == policy and r["budget"] == budget]
            if own:
                ratio = statistics.fmean(row["perplexity_ratio"] for row in own)
                cells.append(f"{policy} {budget:.0%}: {ratio:.3f}")
    return "perplexity over full attention, running text: " + ", ".join(
        cells
    ), "depends on the budget"


def _acceptance(result: Result) -> tuple[str, str]:
    cells = [
        f"{row['context']} tokens: window only {row['window_acceptance']:.1%}, routed pages {row['routed_acceptance']:.1%}"
        for row in result["gains"]
    ]
    best = max(row["gain"] for row in result["gains"])
    return (
        "a draft that reads a part of the cache, equal budget, accepted: " + "; ".join(cells),
        f"prefetch cannot change it (lossless); where drafts read routed pages: {100 * best:+.1f} points at best",
    )


def _images(result: Result) -> tuple[str, str]:
    cells, verdicts = [], []
    for table in result["tables"]:
        row = judged_at(table, result)
        if row is None or row["relative"] is None:
            continue
        cells.append(
            f"{table['name']}, {row['budget']:.0%} of the image tokens by `{row['router']}`: {1 / row['ratio']:.2f} times as fast "
            f"as dense, {100 * (row['relative'] - 1):+.1f} % accuracy"
        )
        verdicts.append(row["ratio"] <= 1 / 1.27 and row["relative"] >= 1)
    if not cells:
        return "no budget of 33 % in the record", "open"
    both = "holds" if all(verdicts) else "holds in part" if any(verdicts) else "does not hold here"
    return "; ".join(cells), both


CLAIMS: tuple[tuple[str, str, Callable[[Result], tuple[str, str]]], ...] = (
    ("four pages cover 92 % of accesses of high weight", "recall", _coverage),
    ("routing head <= 0.17 % of decoder operations, p99 < 0.3 ms", "router", _cost),
    ("both localities together: +23 % retrieval accuracy", "ablation", _locality),
    ("page sizes have two peaks: 68 % of 8-16 tokens, 22 % of 1-4", "sizing", _sizes),
    ("23 to 31 tokens/s, jitter -47 %", "decode", _speed),
    ("accuracy drops by 0.3 % at most", "closed_loop", _loss),
    ("speculation: acceptance 58 to 73 %, latency -31 %", "self_draft", _acceptance),
    ("LLaVA 27 % faster, VQA +0.8 %", "image_budgets", _images),
)
LATER = (
    "a dequantisation head saves routing on AWQ models",
    "five production metrics, retraining below 82 % hit rate",
)
