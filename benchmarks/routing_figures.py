"""Tables of what routing costs and gives, made from records: called by render_figures.py.

A trained router is recorded once a seed, in folders `oval-0`, `oval-1`, ...; tables show their mean, with the range of the seeds.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Row = dict[str, Any]
_SEED = re.compile(r"^oval-\d+$")
LEARNED = "**oval (learned)**"


def render_closed_loop(result: Row) -> str:
    """Returns perplexity against full attention, by policy, router and budget: running text, and the mean of several kinds."""
    rows = [row for row in result["decode"] if row["signal"] != "full"]
    budgets = sorted({row["budget"] for row in rows})
    shown = {"text": "text", "mean": "all kinds"}
    kinds = [kind for kind in shown if any(row["kind"] == kind for row in rows)]
    columns = " | ".join(shown[kind] for kind in kinds)
    head = " | ".join(f"{budget:.0%}: {columns} | keys read" for budget in budgets)
    lines = [
        f"| policy | router | known | {head} |",
        "|---|---|---|" + "---|" * (len(kinds) + 1) * len(budgets),
    ]
    for policy in ("routed", "guarded"):
        own = [row for row in rows if row["policy"] == policy]
        for name in _names(own):
            cells = []
            for budget in budgets:
                found = [_at(own, name, budget, kind) for kind in kinds]
                cells += [_ratio(at) for at in found]
                cells.append(f"{_mean(found[-1], 'read_share'):.0%}")
            known = "with the query" if own_lead(own, name) == 0 else "before"
            lines.append(f"| {policy} | {name} | {known} | {' | '.join(cells)} |")
    settings = result["settings"]
    lines.append(
        f"\n  Perplexity over that of full attention (1.00 is none lost), {', '.join(settings['kinds'])}, "
        f"{settings['passages']} passages each of {settings['context']} + {settings['steps']} tokens; in brackets 95 % over "
        "passages (bootstrap; the learned router: means over three seeds). Routers that score before the query leave "
        f"{settings['second_look']:.0%} of the budget to the second look, rivals as well."
    )
    return "\n".join(lines)


def own_lead(rows: Sequence[Row], name: str) -> int:
    """Returns the lead of a router in some rows."""
    return int(next(row["lead"] for row in rows if _name(row) == name))


def render_passkeys(result: Row) -> str:
    """Returns right answers of those that are right under full attention."""
    rows = [row for row in result["passkeys"] if row["signal"] != "full"]
    columns = sorted({(row["flavour"], row["context"]) for row in rows}, reverse=True)
    budgets = sorted({row["budget"] for row in rows})
    head = " | ".join(f"{flavour}, {context} tokens" for flavour, context in columns)
    lines = [f"| policy | router | budget | {head} |", "|---|---|---|" + "---|" * len(columns)]
    for policy in ("routed", "guarded"):
        own = [row for row in rows if row["policy"] == policy]
        for name in _names(own):
            for budget in budgets:
                cells = []
                for flavour, context in columns:
                    same = [
                        r
                        for r in own
                        if (_name(r), r["budget"], r["flavour"], r["context"])
                        == (name, budget, flavour, context)
                    ]
                    right = sum(r["correct_where_full_is"] for r in same)
                    cells.append(f"{right} of {sum(r['full_correct'] for r in same)}")
                lines.append(f"| {policy} | {name} | {budget:.0%} | {' | '.join(cells)} |")
    return "\n".join(lines)


def render_recall(result: Row) -> str:
    """Returns mass recall and output error by signal and lead: mean of the kinds, and retrieval alone."""
    rows = [row for row in result["rows"] if row["loop"] == "closed"]
    budgets = [b for b in sorted({row["budget"] for row in rows}) if b in (0.1, 0.2)]
    leads = sorted({row["lead"] for row in rows})
    head = " | ".join(f"{b:.0%}: mass | error | retrieval" for b in budgets)
    lines = [
        f"| lead | signal | {head} | MB moved a token | ms |",
        "|---|---|" + "---|---|---|" * len(budgets) + "---|---|",
    ]
    for lead in leads:
        own = [row for row in rows if row["lead"] == lead]
        ranked = sorted(
            _names(own),
            key=lambda name: -_mean(_at(own, name, budgets[-1], "mean"), "mass_recall"),
        )
        for name in ranked:
            cells = []
            for budget in budgets:
                mean, retrieval = (
                    _at(own, name, budget, "mean"),
                    _at(own, name, budget, "retrieval"),
                )
                cells.append(
                    f"{_mean(mean, 'mass_recall'):.4f}{_range(mean, 'mass_recall')} | {_mean(mean, 'output_error'):.4f} "
                    f"| {_mean(retrieval, 'mass_recall'):.4f}"
                )
            last = _at(own, name, budgets[-1], "mean")
            moved = _mean(last, "new_bytes_per_token") / 1e6
            shown = lead if lead else "0 (true query)"
            lines.append(
                f"| {shown} | {name} | {' | '.join(cells)} | {moved:.2f} | {_mean(last, 'selector_ms'):.1f} |"
            )
    return "\n".join(lines)


def render_ablation(result: Row) -> str:
    """Returns mass recall and missed output of each variant."""
    rows = [row for row in result["rows"] if row["budget"] == 0.2]
    lines = [
        "| variant | lead 1: mass | missed output | retrieval | lead 16: mass | retrieval |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["signal"] for row in rows):
        cells = []
        for lead in (1, 16):
            mean, retrieval = (
                next(r for r in rows if (r["signal"], r["lead"], r["kind"]) == (name, lead, kind))
                for kind in ("mean", "retrieval")
            )
            low, high = mean["mass_recall_95"]
            cells.append(f"{mean['mass_recall']:.4f} ({low:.3f}-{high:.3f})")
            if lead == 1:
                cells.append(f"{mean['missed_output']:.4f}")
            cells.append(f"{retrieval['mass_recall']:.4f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append(
        f"\n  Budget 20 %, {result['updates']} updates on {result['train_passages']} passages, seeds {result['seeds']}, judged on "
        f"{result['test_passages']} others; 95 % intervals over passages and seeds."
    )
    return "\n".join(lines)


def render_sketch(result: Row) -> str:
    """Returns the table of benchmarks/page_sketch.py."""
    lines = [
        "| summary | bytes, of keys and values | mass that the best fifth holds | log mass: bias | error |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        size = f"{row['bytes_share']:.1%}" if row["bytes_share"] else ""
        lines.append(
            f"| {row['summary']} | {size} | {row['mass_recall']:.3f} | {row['log_mass_bias']:+.2f} | {row['log_mass_error']:.2f} |"
        )
    return "\n".join(lines)


def render_router(result: Row) -> str:
    """Returns the cost of one selection."""
    return (
        f"  {result['settings']['pages']} pages, one thread: {result['p50_ms']:.1f} ms a selection (p99 {result['p99_ms']:.1f}): "
        f"signals {result['signals_p50_ms']:.1f}, scores {result['score_p50_ms']:.1f}, choice {result['choose_p50_ms']:.1f}. "
        f"Operations: router {result['router_flops'] / 1e6:.2f} M, signals {result['signal_flops'] / 1e6:.1f} M, "
        f"decoder {result['decoder_flops'] / 1e6:.0f} M: {result['flops_ratio']:.2%}; {result['router_parameters']:,} parameters."
    )


def render_sizing(result: Row) -> str:
    """Returns mass recall and output error by page sizing, at equal bytes, and the spread of sizes."""
    lines = [
        "| sizing | pages | persistence 10 %: mass / error | 20 % | sketch 10 % | 20 % | best possible 20 % | sizes (pages) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["sizing"] for row in result["rows"]):
        own = [row for row in result["rows"] if row["sizing"] == name]

        def cell(router: str, budget: float, own: list[Row] = own) -> str:
            row = next(r for r in own if (r["router"], r["budget"]) == (router, budget))
            return f"{row['recall']:.3f} / {row['output_error']:.3f}"

        spread = ", ".join(f"{size}: {count}" for size, count in own[0]["histogram"].items())
        lines.append(
            f"| {name} | {own[0]['pages']:.0f} | {cell('persistence', 0.1)} | {cell('persistence', 0.2)} "
            f"| {cell('sketch', 0.1)} | {cell('sketch', 0.2)} | {cell('oracle_mass', 0.2)} | {spread} |"
        )
    return "\n".join(lines)


ROUTING: dict[str, Callable[[Row], str]] = {
    "ablation": render_ablation,
    "closed_loop": render_closed_loop,
    "passkeys": render_passkeys,
    "recall": render_recall,
    "router": render_router,
    "sizing": render_sizing,
    "sketch": render_sketch,
}
"""By the name of the block in a page."""

FROM: dict[str, str] = {}
"""Blocks whose record has another name."""


def _name(row: Row) -> str:
    return LEARNED if _SEED.match(row["signal"]) else str(row["signal"])


def _names(rows: Iterable[Row]) -> list[str]:
    names = dict.fromkeys(_name(row) for row in rows)
    if LEARNED in names:
        names.pop("output_aware", None)  # the router that ships is one of the seeds
    return list(names)


def _at(rows: Iterable[Row], name: str, budget: float, kind: str) -> list[Row]:
    return [r for r in rows if (_name(r), r["budget"], r["kind"]) == (name, budget, kind)]


def _mean(rows: Sequence[Row], field: str) -> float:
    values = [row[field] for row in rows if row[field] is not None]
    return statistics.fmean(values) if values else float("nan")


def _range(rows: Sequence[Row], field: str) -> str:
    values = [row[field] for row in rows]
    return f" ({min(values):.3f}-{max(values):.3f})" if len(values) > 1 else ""


def _ratio(rows: Sequence[Row]) -> str:
    spreads = [row["perplexity_ratio_interval"] for row in rows]
    known = [spread for spread in spreads if spread is not None]
    low, high = (statistics.fmean(s[i] for s in known) if known else 0.0 for i in (0, 1))
    spread = f" ({low:.3f}-{high:.3f})" if known else ""
    return f"{_mean(rows, 'perplexity_ratio'):.3f}{spread}"
