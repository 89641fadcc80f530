"""Tables of what `oval bench recall` measured, for people. Prints nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich import box
from rich.table import Table

from oval_adapters.bench.recall_values import (
    Interval,
    LoopRow,
    PasskeyRow,
    RecallReport,
    RecallRow,
)

LEGEND = (
    "recall: attention mass covered, %, and its 95 % interval over passages; p10: its tenth percentile; rest: of the mass "
    "outside pages that are always read; pages: those among the best; heavy: of pages with 5 % of the mass or more; "
    "error: of a head's output, %; missed, new: MB a token; ms: to score the pages of one sequence",
    "ppl: perplexity; ratio: over full attention's, and its 95 % interval; read: keys that routed layers read, %; more: "
    "bytes of key summaries besides, %; seen: true attention mass that was read, %; ms: a forward of all passages; "
    "*: as above",
)


def recall_tables(report: RecallReport) -> Iterator[Table]:
    """Yields a table for each kind of text, loop, lead and budget; the router that covers most comes first."""
    for (kind, loop), own in groupby(report.rows, key=lambda row: (row.kind, row.loop)):
        rows = list(own)
        leads = sorted({row.lead for row in rows if row.lead}) or [0]
        for lead in leads:
            for budget in report.settings.budgets:
                shown = [r for r in rows if r.lead in (0, lead) and r.budget == budget]
                title = f"{kind}, lead {lead}, budget {budget:.1%}, {loop} loop"
                yield _recall_table(title, shown)


def loop_tables(report: RecallReport) -> Iterator[Table]:
    """Yields a table for each kind of text, by what the model decoded with."""
    for kind, own in groupby(report.decode, key=lambda row: row.kind):
        yield _loop_table(f"{kind}, decoded", list(own))


def passkey_tables(report: RecallReport) -> Iterator[Table]:
    """Yields a table for each flavour and length: right answers by budget."""
    rows = report.passkeys
    for (flavour, context), own in groupby(rows, key=lambda row: (row.flavour, row.context)):
        yield _passkey_table(flavour, context, list(own), report.settings.budgets)


def _recall_table(title: str, rows: Sequence[RecallRow]) -> Table:
    names = ("recall", "interval", "p10", "rest", "pages", "heavy", "error", "missed", "new", "ms")
    table = _table(title, ("router", *names))
    for row in sorted(rows, key=lambda row: -row.mass_recall):
        shares = (
            row.mass_recall_p10,
            row.mass_recall_excluding_kept,
            row.page_recall,
            row.heavy_page_recall,
            row.output_error,
        )
        table.add_row(
            row.signal if row.lead else f"{row.signal} *",
            _percent(row.mass_recall),
            _interval(row.mass_recall_interval, 100, 1),
            *map(_percent, shares),
            f"{row.miss_bytes_per_token / 1e6:.2f}",
            f"{row.new_bytes_per_token / 1e6:.2f}",
            f"{row.selector_ms:.2f}",
        )
    if any(not row.lead for row in rows):
        table.caption = "* needs the layer's own query, at every step"
    return table


def _loop_table(title: str, rows: Sequence[LoopRow]) -> Table:
    names = ("lead", "budget", "ppl", "ratio", "interval", "read", "more", "seen", "ms")
    table = _table(title, ("router", *names))
    for row in sorted(rows, key=lambda row: (row.budget, row.perplexity)):
        table.add_row(
            f"{row.signal}, {row.policy}" if row.policy == "guarded" else row.signal,
            str(row.lead) if row.lead else "*",
            _percent(row.budget),
            f"{row.perplexity:.2f}",
            f"{row.perplexity_ratio:.4f}",
            _interval(row.perplexity_ratio_interval, 1, 3),
            _percent(row.read_share),
            _percent(row.summary_share),
            _percent(row.mass_recall),
            f"{row.ms_per_token:.1f}",
        )
    return table


def _passkey_table(
    flavour: str, context: int, rows: Sequence[PasskeyRow], budgets: Sequence[float]
) -> Table:
    full = rows[0].full_correct
    title = f"passkeys, {flavour}, {context} tokens: full attention {full} of {rows[0].cases}"
    table = _table(title, ("router", "policy", "lead", *(f"{budget:.1%}" for budget in budgets)))
    routed = [row for row in rows if row.policy != "full"]
    for (signal, policy, lead), own in groupby(routed, lambda r: (r.signal, r.policy, r.lead)):
        by_budget = {row.budget: row for row in own}
        cells = [f"{by_budget[b].correct} ({by_budget[b].correct_where_full_is})" for b in budgets]
        table.add_row(signal, policy, str(lead), *cells)
    table.caption = "right answers, and in brackets those where full attention is right too"
    return table


def _table(title: str, names: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False, padding=0)
    for place, name in enumerate(names):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    table.caption_justify = "left"
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _interval(interval: Interval | None, scale: float, digits: int) -> str:
    if interval is None:
        return ""
    low, high = interval
    return f"{scale * low:.{digits}f}-{scale * high:.{digits}f}"
