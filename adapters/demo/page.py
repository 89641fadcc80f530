"""The demo as one HTML page that stands alone: no requests, light and dark, readable without scripts. All text is escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from oval_adapters.demo.run import Demo
from oval_adapters.demo.settings import DONE, Part
from oval_adapters.demo.wording import away, forwards, number, orders, percent, truth
from oval_adapters.evaluation.page_style import STYLE
from oval_adapters.page_report.drawing import SCRIPT, draw_reads
from oval_adapters.page_report.drawing import STYLE as READS_STYLE

__all__ = ["quiet_tags", "render_demo"]

_MB = 1e6
_OWN_STYLE = """
.facts-table td { text-align: left; white-space: normal; }
.facts-table td + td { color: var(--soft); font-size: .85rem; min-width: 16rem; }
.tag { color: var(--soft); font-size: .75em; border: 1px solid var(--line); border-radius: .2rem; padding: 0 .2rem; }
.tag::after { content: " "; }
"""
_SPECIAL = re.compile(r"&lt;\|([A-Za-z0-9_]+)\|&gt;")
"""A special token as `html.escape` writes it."""
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
        *_times(demo),
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
    return f"{named}; {facts['machine']['cpu']}, {facts['threads']} threads; {facts['seconds']:.0f} s{speed}"


def _times(demo: Demo) -> Iterator[str]:
    facts = demo.facts
    rows = [["imports", "done", f"{facts['start_s']:.1f}"]]
    rows += [[name, part.state, f"{part.seconds:.1f}"] for name, part in demo.parts.items()]
    rows.append(["all, without Python's own start", "", f"{facts['seconds']:.1f}"])
    yield from _table(("part", "state", "s"), rows)
    yield '<p class="note">Each part loads its model anew, and that is counted.</p>'


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
    yield from _truth(own)
    yield from _table(("", "", ""), _answer_rows(own))
    yield "<h2>What each token read</h2>"
    yield (
        "<p>Shares of the attention of the query that chose the token, mean over layers and heads, by page of the cache. "
        "Pages of pictures are tiles, drawn over what the vision tower got, redder where more was read; text pages are listed.</p>"
    )
    yield quiet_tags(draw_reads(demo.answer.report, demo.answer.pictures))


def _truth(own: Mapping[str, Any]) -> Iterator[str]:
    told = truth(own)
    if told is None:
        return
    yield f"<p><b>{_text(told[0].upper() + told[1:])}.</b></p>"
    if own.get("expected"):
        yield f'<p class="note">Expected, articles aside: {_text(own["expected"])}</p>'
    yield (
        f'<p class="note">The picture was chosen: it is the first of {own["tried"]} new ones that {_text(own["chosen_for"])} '
        "describes rightly, in float32 and in bfloat16. That model is tiny and often wrong, most of all about left, right "
        "and numbers; the sample below was not chosen. How often it is right: docs/images.md.</p>"
    )


def _answer_rows(own: Mapping[str, Any]) -> list[list[str]]:
    rows = [
        ["tokens", forwards(own), f"The prompt has {own['prompt_tokens']} tokens, those of the picture among them. The end token counts, too."],
        ["drafted by", f"{own['drafter']}; {percent(own['acceptance_rate'])} of drafted tokens accepted", "Of a tree of drafts one path at most is accepted."],
        ["pages", f"{own['image_pages']} of the picture, {own['text_pages']} of text", "Those of the cache at the end."],
        ["fast memory", f"{own['fast_tokens']} tokens; {away(own)}", f"The rest lies in a file ({own['link']} link). Fast memory also takes new tokens, drafts and what is being brought in; pages are brought in layer by layer, for each forward anew."],
        ["pages found in fast memory", percent(own["page_hit_rate"]), "Of all reads of a page by a layer, after the prompt: in place, or prefetched in time."],
        ["prefetched", f"{own['bytes_prefetched'] / _MB:.1f} MB, of it read {own['bytes_used'] / _MB:.1f} MB; on demand {own['bytes_demanded'] / _MB:.1f} MB", "Before a layer asked, and only when it asked."],
        ["transfers", f"{1e3 * own['transfer_s']:.0f} ms, of it waited {1e3 * own['stall_s']:.0f} ms", "The rest went on beside the computing."],
        ["time", f"{own['seconds_of_answer']:.2f} s, of it prompt {own['prompt_s']:.2f} s; {own['dtype']}, backend {own['backend']}", "Slower than without this page: what is read is added up for it."],
    ]  # fmt: skip
    if own["image_share"] is not None:
        rows.insert(0, ["attention on the picture", percent(own["image_share"]), "Mean over the answer's tokens, layers and heads; the rest goes to text."])  # fmt: skip
    return rows


def _sample(part: Part | None) -> Iterator[str]:
    if part is None or part.state != DONE:
        return
    own = part.values
    yield "<h2>A sample in MMBench's form</h2>"
    yield (
        f"<p>{own['questions']} questions of four options, {orders(own)} ({own['rows']} answers). Guessing gets 25 % of them as they "
        f"stand{'' if own['circular'] is None else ', and 0.4 % in every order'}; too few to rank models by. "
        "The scenes are new ones of the emoji that smol-llava learnt from, and were not chosen.</p>"
    )
    kinds = {"right as it stands": "vanilla", "right in every order": "circular"}
    if own["circular"] is None:
        kinds.popitem()
    by_category = {**own["by_category"], "all": own}
    rows = [
        [name.replace("_", " "), str(row["questions"]), *(percent(row[kind]) for kind in kinds.values())]
        for name, row in by_category.items()
    ]  # fmt: skip
    yield from _table(("", "questions", *kinds), rows)


def _acceptance(part: Part | None) -> Iterator[str]:
    if part is None or part.state != DONE:
        return
    own = part.values
    yield f"<h2>Drafts: {_text(own['model'])}, {_text(own['drafter'])}</h2>"
    low, high = own["tau_interval"] or (None, None)
    between = "" if low is None else f" (95 %: {number(low)} to {number(high)})"
    places = ", ".join(percent(share) for share in own["accepted_by_position"] or ())
    rows = [
        ["tokens a forward", f"{number(own['tau'])}{between}, over {own['prompts']} prompts", "The prompt's forward is not counted, nor the token that it brings."],
        ["accepted by position", places, "In how many forwards the 1st, 2nd, ... drafted token was taken."],
        ["of proposed", percent(own["draft_acceptance_rate"]), "Of a tree of drafts one path at most is accepted."],
        ["tokens a second", f"{number(own['tokens_per_s'], 1)}, plain {number(own['plain_tokens_per_s'], 1)}: {number(own['speedup'])} times", "After the prompt. Below 1 times drafts cost more here than they save: on a small model, often."],
        ["texts equal to plain decoding's", f"{own['identical']} of {own['prompts']} ({own['dtype']})", _why_texts_differ(own)],
    ]  # fmt: skip
    yield from _table(("", "", ""), rows)


def _why_texts_differ(own: Mapping[str, Any]) -> str:
    if own["dtype"] == "float32":
        return "In float32 drafts change no token."
    return (
        f"In {own['dtype']} a forward of several tokens rounds otherwise than forwards of one, and where two tokens are nearly as "
        "likely the other may be taken. With --dtype float32 the texts are the same."
    )


def quiet_tags(drawn: str) -> str:
    """Returns the drawing with special tokens as small tags: they are no text."""
    return _SPECIAL.sub(r'<span class="tag">\1</span>', drawn)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    named = any(heads)
    yield f'<div class="wide"><table{"" if named else " class=facts-table"}>'
    if named:
        yield f"<thead><tr>{''.join(f'<th scope=col>{_text(head)}</th>' for head in heads)}</tr></thead>"
    yield "<tbody>"
    for first, *others in rows:
        yield f'<tr><th scope="row">{_text(first)}</th>{"".join(f"<td>{_text(cell)}</td>" for cell in others)}</tr>'
    yield "</tbody></table></div>"


def _text(text: str) -> str:
    return html.escape(text, quote=True)
