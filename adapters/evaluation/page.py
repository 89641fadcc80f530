"""The report as one HTML page that stands alone: no links, no scripts, light and dark. All text is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from oval_adapters.evaluation.page_style import STYLE
from oval_adapters.evaluation.report import AcceptanceReport, definitions
from oval_adapters.evaluation.samples import BONUS, DRAFTED, PROMPT, Piece, Sample
from oval_adapters.evaluation.settings import PLAIN
from oval_adapters.evaluation.tables import NAMES, figure, notes
from oval_adapters.evaluation.totals import Totals

__all__ = ["render_page"]

_ORIGINS = {
    PROMPT: "came with the prompt's forward",
    DRAFTED: "proposed by the drafter, accepted by the model",
    BONUS: "the model's own token at the end of a step",
}
_POSITIONS = 8


def render_page(report: AcceptanceReport, samples: Sequence[Sample]) -> str:
    """Returns the page.

    Args:
        report: the figures.
        samples: answers to be shown with how each token came.
    """
    title = f"Acceptance of drafts: {report.settings.model}"
    body = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="facts">{_text(_facts(report))}</p>',
        *(f'<p class="note">{_text(note)}</p>' for note in notes(report)),
        "<h2>All prompts</h2>",
        *_overall(report),
        "<h2>Tokens a second</h2>",
        *_speed(report),
        "<h2>Accepted by position</h2>",
        "<p>Share of steps that accepted a proposed token at each place after the last one.</p>",
        *_by_position(report),
        *_by_category(report),
        *_samples(samples),
        "<h2>What the figures mean</h2>",
        *_definitions(),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{_text(title)}</title><style>{STYLE}</style>'
    lines = "\n".join(body)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{lines}\n</main></body></html>\n'


def _facts(report: AcceptanceReport) -> str:
    settings, facts = report.settings, report.facts
    sampled = "greedy" if settings.is_greedy else f"temperature {settings.temperature:g}"
    prompts = report.overall[PLAIN].prompts
    return (
        f"{prompts} prompts of {Path(settings.prompts).name}, up to {settings.max_new_tokens} tokens each, {sampled}, "
        f"batches of {settings.batch_size}, {facts['dtype']}, backend {facts['backend']}, {facts['machine']['cpu']}, "
        f"{facts['threads']} threads, {report.processes} process{'' if report.processes == 1 else 'es'}"
    )


def _overall(report: AcceptanceReport) -> Iterator[str]:
    heads = ("", "identical", "tau", "95 %", "drafted a step", "accepted of drafted", "tokens/s", "speed-up", "95 %", "median", "with prompt", "Spec-Bench's")  # fmt: skip
    if report.facts["tiers"]:
        heads = (*heads, "page hit rate", "stall, s")
    yield from _table(heads, [[_name(label), *_cells(report, label)] for label in report.labels])


def _cells(report: AcceptanceReport, label: str) -> list[str]:
    side = report.overall[label]
    cells = [
        "sampled" if side.identical is None else f"{side.identical} / {side.prompts}",
        figure(side.tau, 2),
        _interval(side.tau_interval),
        figure(side.drafted_per_step, 1),
        _percent(side.draft_acceptance_rate),
        figure(side.tokens_per_s, 1),
        figure(side.speedup, 2),
        _interval(side.speedup_interval),
        figure(side.speedup_p50, 2),
        figure(side.whole_speedup, 2),
        figure(side.mean_speedup, 2),
    ]
    if report.facts["tiers"]:
        cells += [_percent(side.page_hit_rate), figure(side.stall_s, 2)]
    return cells


def _speed(report: AcceptanceReport) -> Iterator[str]:
    speeds = [report.overall[label].tokens_per_s or 0.0 for label in report.labels]
    most = max(speeds) or 1.0
    yield '<div class="bars">'
    for label, speed in zip(report.labels, speeds, strict=True):
        yield _bar(_name(label), speed / most, f"{speed:.1f}")
    yield "</div>"


def _by_position(report: AcceptanceReport) -> Iterator[str]:
    yield '<div class="fields">'
    for label in report.labels:
        shares = report.overall[label].accepted_by_position
        if shares is None:
            continue
        yield f'<section class="field"><h3>{_text(_name(label))}</h3><div class="bars">'
        for place, share in enumerate(shares[:_POSITIONS], start=1):
            yield _bar(str(place), share, f"{100 * share:.0f} %")
        yield "</div></section>" if shares else "<p>none</p></div></section>"
    yield "</div>"


def _by_category(report: AcceptanceReport) -> Iterator[str]:
    heads = ("", *report.categories, "all")
    for title, part, places in (("Tau by category", "tau", 2), ("Speed-up by category", "speedup", 2), ("Tokens a second by category", "tokens_per_s", 1)):  # fmt: skip
        labels = [label for label in report.labels if label != PLAIN or part == "tokens_per_s"]
        yield f"<h2>{title}</h2>"
        yield from _table(heads, [[_name(label), *(figure(getattr(side, part), places) for side in _sides(report, label))] for label in labels])  # fmt: skip


def _sides(report: AcceptanceReport, label: str) -> list[Totals]:
    return [*report.by_category[label].values(), report.overall[label]]


def _samples(samples: Sequence[Sample]) -> Iterator[str]:
    if not samples:
        return
    yield f"<h2>Answers by how their tokens came: {_text(_name(samples[0].label))}</h2>"
    keys = "".join(f'<span class="token {name}">{_text(name)}</span> {_text(meaning)}. ' for name, meaning in _ORIGINS.items())  # fmt: skip
    yield f'<p class="key">{keys}</p>'
    for sample in samples:
        tau = "" if sample.tau is None else f", tau {sample.tau:.2f}"
        yield f"<h3>{_text(f'{sample.category}, {sample.name}{tau}')}</h3>"
        steps = (list(own) for _, own in groupby(sample.pieces, key=lambda piece: piece.step))
        yield f'<p class="answer">{"".join(map(_step, steps))}</p>'


def _step(pieces: Sequence[Piece]) -> str:
    inner = "".join(f'<span class="token {piece.origin}">{_text(piece.text)}</span>' for piece in pieces)  # fmt: skip
    return f'<span class="step" title="step {pieces[0].step}">{inner}</span>'


def _definitions() -> Iterator[str]:
    yield "<dl>"
    for name, text in definitions().items():
        yield f"<dt>{_text(name)}</dt><dd>{_text(text)}</dd>"
    yield "</dl>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield '<div class="wide"><table><thead><tr>'
    yield "".join(f'<th scope="col">{_text(head)}</th>' for head in heads)
    yield "</tr></thead><tbody>"
    for first, *others in rows:
        cells = "".join(f"<td>{_text(cell)}</td>" for cell in others)
        yield f'<tr><th scope="row">{_text(first)}</th>{cells}</tr>'
    yield "</tbody></table></div>"


def _bar(name: str, share: float, shown: str) -> str:
    width = 100 * min(max(share, 0.0), 1.0)
    return (
        f'<div class="bar"><span class="name">{_text(name)}</span>'
        f'<span class="track"><span class="fill" style="width:{width:.1f}%"></span></span>'
        f'<span class="value">{_text(shown)}</span></div>'
    )


def _name(label: str) -> str:
    return NAMES.get(label, label)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _interval(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"


def _text(text: str) -> str:
    return html.escape(text, quote=True)
