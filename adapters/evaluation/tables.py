"""The report as tables for a terminal. Words only; nothing is computed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from oval_adapters.evaluation.report import AcceptanceReport, definitions
from oval_adapters.evaluation.settings import HF, PLAIN
from oval_adapters.evaluation.totals import Interval, Totals

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["NAMES", "figure", "legend", "notes", "tables"]

NAMES = {PLAIN: "plain (OVAL)", HF: "Hugging Face"}
"""How sides that are no drafter are shown."""

_POSITIONS = 4
_NAME_WIDTH = 20


def tables(report: AcceptanceReport) -> Iterator[Table]:
    """Yields the tables: acceptance, speed, tau and speed-up by category, pages."""
    yield _table(report, "acceptance", _ACCEPTANCE)
    yield _table(report, "speed", _SPEED)
    if len(report.categories) > 1:
        drafters = [side.label for side in report.settings.sides]
        others = [label for label in report.labels if label != PLAIN]
        yield _by_category(report, "tau by category", drafters, lambda t: figure(t.tau, 2))
        yield _by_category(report, "speed-up by category", others, lambda t: figure(t.speedup, 2))
    if report.facts["tiers"]:
        yield _table(report, "pages", _PAGES)


def notes(report: AcceptanceReport) -> Iterator[str]:
    """Yields what the figures leave out: skipped prompts, later turns, texts that part."""
    if not report.whole:
        yield f"not all prompts are done: {len(report.rows)} units"
    if report.skipped:
        names = ", ".join(f"{skip.name} ({skip.prompt_tokens})" for skip in report.skipped[:5])
        more = ", ..." if len(report.skipped) > 5 else ""
        yield f"{len(report.skipped)} prompts skipped, too long for the model (tokens): {names}{more}"
    if report.num_later_turns:
        yield f"first turns only: {report.num_later_turns} later turns were not asked"
    for label in report.labels:
        partings = report.overall[label].partings
        known = [abs(p.margin) for p in partings if p.margin is not None]
        if partings:
            widest = f"; widest margin there {max(known):.3g}" if known else ""
            earliest = min(p.step for p in partings)
            yield f"{NAMES.get(label, label)}: {len(partings)} texts part from plain decoding's, the first at token {earliest}{widest}"


def legend() -> str:
    """Returns what each figure means, a line each."""
    return "\n".join(f"{name}: {text}" for name, text in definitions().items())


def figure(value: float | None, places: int, scale: float = 1.0) -> str:
    """Returns a number as text; nothing for one that is not there."""
    return "" if value is None else f"{value * scale:.{places}f}"


def _spread(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}"


def _positions(side: Totals) -> str:
    shares = side.accepted_by_position
    if shares is None:
        return ""
    shown = " ".join(f"{100 * share:.0f}" for share in shares[:_POSITIONS])
    return shown + (" ..." if len(shares) > _POSITIONS else "")


def _identical(side: Totals) -> str:
    return "sampled" if side.identical is None else f"{side.identical}/{side.prompts}"


_Columns = tuple[tuple[str, Callable[[Totals], str]], ...]
_ACCEPTANCE: _Columns = (
    ("same", _identical),
    ("tau", lambda t: figure(t.tau, 2)),
    ("95 %", lambda t: _spread(t.tau_interval)),
    ("by position %", _positions),
    ("drafted", lambda t: figure(t.drafted_per_step, 1)),
    ("rate %", lambda t: figure(t.draft_acceptance_rate, 1, 100)),
)
_SPEED: _Columns = (
    ("tokens/s", lambda t: figure(t.tokens_per_s, 1)),
    ("speed-up", lambda t: figure(t.speedup, 2)),
    ("95 %", lambda t: _spread(t.speedup_interval)),
    ("median", lambda t: figure(t.speedup_p50, 2)),
    ("whole", lambda t: figure(t.whole_speedup, 2)),
    ("mean", lambda t: figure(t.mean_speedup, 2)),
)
_PAGES: _Columns = (
    ("page hit rate %", lambda t: figure(t.page_hit_rate, 1, 100)),
    ("stall, s", lambda t: figure(t.stall_s, 2)),
    ("hidden %", lambda t: figure(t.stall_hidden, 1, 100)),
    ("stall of plain, s", lambda t: figure(t.plain_stall_s, 2)),
)


def _new(title: str, first: Sequence[str], names: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    width = min(_NAME_WIDTH, max(map(len, first)))
    table.add_column("", overflow="fold", min_width=width)
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _table(report: AcceptanceReport, title: str, columns: _Columns) -> Table:
    shown = [NAMES.get(label, label) for label in report.labels]
    table = _new(title, shown, [name for name, _ in columns])
    for label, name in zip(report.labels, shown, strict=True):
        table.add_row(name, *(cell(report.overall[label]) for _, cell in columns))
    return table


def _by_category(
    report: AcceptanceReport, title: str, labels: Sequence[str], cell: Callable[[Totals], str]
) -> Table:
    table = _new(title, report.categories, [NAMES.get(label, label) for label in labels])
    for name in report.categories:
        table.add_row(name, *(cell(report.by_category[label][name]) for label in labels))
    table.add_row("all", *(cell(report.overall[label]) for label in labels))
    return table
