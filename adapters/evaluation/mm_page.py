"""A report on answers about images as one HTML page that stands alone, and as tables for a terminal. All text is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from oval_adapters.evaluation.mm_report import MMReport, Section
from oval_adapters.evaluation.page_style import STYLE

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["facts_line", "render_mm_page", "terminal_tables"]

_OWN_STYLE = """
.texts td { text-align: left; white-space: pre-wrap; overflow-wrap: anywhere; vertical-align: top; max-width: 26rem; }
.texts th { vertical-align: top; }
"""
_SHOWN_FAILURES = 200


def render_mm_page(report: MMReport) -> str:
    """Returns the page."""
    body = [
        f"<h1>{_text(report.title)}</h1>",
        f'<p class="facts">{_text(facts_line(report))}</p>',
        *(f'<p class="note">{_text(note)}</p>' for note in report.notes),
        *(line for section in report.sections for line in _section(section)),
        *_failures(report),
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(report.title)}</title><style>{STYLE}{_OWN_STYLE}</style>"
    )
    lines = "\n".join(body)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{lines}\n</main></body></html>\n'


def facts_line(report: MMReport) -> str:
    """Returns what was run, in a line."""
    values = report.values
    settings, processes = values["settings"], values["processes"]
    time = values["seconds_per_question"]
    parts = [
        f"{values['rows']} rows asked",
        f"{values['failed_rows']} failed",
        f"scorer: {values['scorer']}",
        f"up to {settings['max_new_tokens']} tokens, greedy",
        str(values["dtype"]),
        str(values["machine"]["cpu"]),
        f"{values['threads']} threads",
        f"{processes} process{'' if processes == 1 else 'es'}",
        *([] if time is None else [f"{time:.2f} s a row"]),
        *(["images blanked"] if settings["blanks_images"] else []),
        *([] if values["image_router"] is None else [_images_read(values)]),
    ]
    return ", ".join(parts)


def _images_read(values: Mapping[str, Any]) -> str:
    share = values["image_tokens_read"] / max(1, values["image_tokens"])
    return f"{share:.0%} of the image tokens read (router {values['image_router']}, budget {values['image_budget']}; lossy)"


def terminal_tables(report: MMReport) -> Iterator[Table]:
    """Yields the short tables."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    for section in report.sections:
        if section.is_long:
            continue
        table = Table(
            title=section.title.lower(), title_justify="left", box=box.SIMPLE, pad_edge=False
        )
        for place, head in enumerate(section.heads):
            table.add_column(head, justify="right" if place else "left", overflow="fold")
        for row in section.rows:
            table.add_row(*map(Text, row))  # Text: names in the data are no markup
        yield table


def _section(section: Section) -> Iterator[str]:
    yield f"<h2>{_text(section.title)}</h2>"
    kind = ' class="texts"' if section.is_long else ""
    yield f'<div class="wide"><table{kind}><thead><tr>'
    yield "".join(f'<th scope="col">{_text(head)}</th>' for head in section.heads)
    yield "</tr></thead><tbody>"
    for first, *others in section.rows:
        cells = "".join(f"<td>{_text(cell)}</td>" for cell in others)
        yield f'<tr><th scope="row">{_text(first)}</th>{cells}</tr>'
    yield "</tbody></table></div>"


def _failures(report: MMReport) -> Iterator[str]:
    if report.failed:
        rows = [[str(row.line), row.index, row.reason] for row in report.failed[:_SHOWN_FAILURES]]
        more = len(report.failed) - len(rows)
        title = "Rows that failed" + (f" (the first {len(rows)}, {more} more)" if more else "")
        heads = (report.place, "index", "reason")
        yield from _section(Section(title=title, heads=heads, rows=rows, is_long=True))


def _text(text: str) -> str:
    return html.escape(text, quote=True)
