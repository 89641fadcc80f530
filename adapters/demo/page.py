"""The demo as one HTML page that stands alone: no requests, light and dark, readable without scripts. All text is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from oval_adapters.demo.run import Demo
from oval_adapters.demo.settings import DONE, Part
from oval_adapters.evaluation.page_style import STYLE
from oval_adapters.page_report.drawing import SCRIPT, draw_reads
from oval_adapters.page_report.drawing import STYLE as READS_STYLE

__all__ = ["render_demo"]

_MB = 1e6
_OWN_STYLE = "\n.facts-table td { text-align: left; white-space: normal; }\n"
_TITLE = "OVAL demo: what the model read"


def render_demo(demo: Demo) -> str:
    """Returns the page."""
    body = [
        f"<h1>{_text(_TITLE)}</h1>",
        f'<p class="facts">{_text(_facts(demo))}</p>',
        *(_note(part) for part in demo.parts.values() if part.state != DONE),
        *_answer(demo),
        *_sample(demo.parts.get("mmbench_sample")),
        *_acceptance(demo.parts.get("acceptance")),
        "<h2>Time</h2>",
        *_table(("part", "state", "s"), [[name, part.state, f"{part.seconds:.1f}"] for name, part in demo.parts.items()]),
    ]  # fmt: skip
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(_TITLE)}</title><style>{STYLE}{READS_STYLE}{_OWN_STYLE}</style>"
    )
    lines = "\n".join(body)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{lines}\n</main>\n<script>{SCRIPT}</script>\n</body></html>\n'


def _facts(demo: Demo) -> str:
    facts = demo.facts
    named = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    speed = ", quick" if facts["quick"] else ""
    return f"{named}; {facts['machine']['cpu']}, {facts['threads']} threads; {facts['seconds']:.0f} s in all{speed}"


def _note(part: Part) -> str:
    return (
        f'<p class="note"><b>{_text(part.name)}: {_text(part.state)}</b>. {_text(part.reason)}</p>'
    )


def _answer(demo: Demo) -> Iterator[str]:
    if demo.answer is None:
        return
    own = demo.answer.values
    yield f"<h2>Answer: {_text(own['model'])}</h2>"
    yield f'<p class="facts">{_text(own["question"])}</p>'
    yield f'<p class="answer">{_text(own["answer"])}</p>'
    yield from _table(("", ""), _answer_rows(own))
    yield "<h2>What each token read</h2>"
    yield (
        "<p>Shares of the attention of the query that chose the token, mean over layers and heads, by page of the cache. "
        "Pages of pictures are tiles, drawn over what the vision tower got, redder where more was read; text pages are listed.</p>"
    )
    yield draw_reads(demo.answer.report, demo.answer.pictures)


def _answer_rows(own: Mapping[str, Any]) -> list[list[str]]:
    rows = [
        ["tokens", f"{own['tokens']} in {len(own['arrivals'])} forwards, after {own['prompt_tokens']} of the prompt"],
        ["drafted by", f"{own['drafter']}; {_number(own['tau'], 2)} tokens a forward, {_percent(own['acceptance_rate'])} of drafts accepted"],
        ["pages", f"{own['image_pages']} of the picture, {own['text_pages']} of text"],
        ["fast memory", f"{own['fast_tokens']} tokens; the rest in a file ({own['link']} link)"],
        ["pages found in fast memory", _percent(own["page_hit_rate"])],
        ["prefetched", f"{own['bytes_prefetched'] / _MB:.1f} MB, of it used {own['bytes_used'] / _MB:.1f} MB; on demand {own['bytes_demanded'] / _MB:.1f} MB"],
        ["transfers", f"{1e3 * own['transfer_s']:.0f} ms, of it waited {1e3 * own['stall_s']:.0f} ms"],
        ["time", f"{own['seconds_of_answer']:.2f} s watched, prompt {own['prompt_s']:.2f} s; {own['dtype']}, backend {own['backend']}"],
    ]  # fmt: skip
    if own["image_share"] is not None:
        rows.insert(0, ["attention on the picture", _percent(own["image_share"])])
    return rows


def _sample(part: Part | None) -> Iterator[str]:
    if part is None or part.state != DONE:
        return
    own = part.values
    yield "<h2>A sample in MMBench's form</h2>"
    yield f"<p>{own['questions']} questions of four options (guessing gets 25 %), in {own['rows']} orders of their options; too few to rank models by.</p>"
    rows = [
        [name, *(_percent(own["by_category"][name][kind]) for kind in ("vanilla", "circular"))]
        for name in own["by_category"]
    ]
    rows.append(["all", _percent(own["vanilla"]), _percent(own["circular"])])
    yield from _table(("", "first order", "right in every order"), rows)


def _acceptance(part: Part | None) -> Iterator[str]:
    if part is None or part.state != DONE:
        return
    own = part.values
    yield f"<h2>Drafts: {_text(own['model'])}, {_text(own['drafter'])}</h2>"
    low, high = own["tau_interval"] or (None, None)
    between = "" if low is None else f" (95 %: {_number(low, 2)} to {_number(high, 2)})"
    places = ", ".join(_percent(share) for share in own["accepted_by_position"] or ())
    rows = [
        ["tokens a forward", f"{_number(own['tau'], 2)}{between}, over {own['prompts']} prompts"],
        ["accepted by position", places],
        ["of proposed", _percent(own["draft_acceptance_rate"])],
        ["tokens a second", f"{_number(own['tokens_per_s'], 1)}, plain {_number(own['plain_tokens_per_s'], 1)}: {_number(own['speedup'], 2)} times"],
        ["texts equal to plain decoding's", f"{own['identical']} of {own['prompts']} ({own['dtype']})"],
    ]  # fmt: skip
    yield from _table(("", ""), rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    named = any(heads)
    yield f'<div class="wide"><table{"" if named else " class=facts-table"}>'
    if named:
        yield f"<thead><tr>{''.join(f'<th scope=col>{_text(head)}</th>' for head in heads)}</tr></thead>"
    yield "<tbody>"
    for first, *others in rows:
        yield f'<tr><th scope="row">{_text(first)}</th>{"".join(f"<td>{_text(cell)}</td>" for cell in others)}</tr>'
    yield "</tbody></table></div>"


def _number(value: float | None, places: int) -> str:
    return "-" if value is None else f"{value:.{places}f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _text(text: str) -> str:
    return html.escape(text, quote=True)
