"""Draws what an answer read as a piece of HTML: pages over the picture, token by token. No scripts needed, all text escaped."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from oval_adapters.page_report.report import ReadPage, ReadReport
from oval_mm.spans import Grid

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["SCRIPT", "STYLE", "data_uri", "draw_reads"]

_SIDE = 336
"""Longer side of a drawn picture, in CSS pixels."""
_TEXT_PAGES = 6
_SHOWN_LETTERS = 160
_LEAST = 0.0005
"""Shares below this are not listed."""

STYLE = """
.reads { display: grid; gap: 1.5rem; margin: 1rem 0; }
.read { display: grid; grid-template-columns: minmax(12rem, max-content) minmax(16rem, 1fr); gap: .5rem 1.5rem; align-items: start; border-top: 1px solid var(--line); padding-top: .75rem; }
.read > p { grid-column: 1 / -1; }
.read svg { display: block; max-width: 100%; height: auto; background: var(--track); }
.read .all { white-space: pre-wrap; overflow-wrap: anywhere; }
.read mark { background: var(--fill); color: var(--ground); border-radius: .15rem; }
.pagelist { list-style: none; margin: 0; padding: 0; display: grid; gap: .3rem; font-size: .85rem; }
.pagelist li { display: grid; grid-template-columns: 4rem 1fr; gap: .6rem; }
.pagelist b { text-align: right; font-variant-numeric: tabular-nums; font-weight: 500; }
.pagelist code { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--track); border-radius: .15rem; padding: 0 .25rem; }
.step-to { display: flex; gap: .75rem; align-items: center; max-width: 44rem; }
.step-to input { flex: 1; }
.one .read { display: none; }
.one .read.now { display: grid; }
@media (max-width: 40rem) { .read { grid-template-columns: 1fr; } }
"""
"""To be put behind `page_style.STYLE`, whose colours it takes."""

SCRIPT = """
for (const box of document.querySelectorAll('.reads')) {
  const all = [...box.querySelectorAll('.read')];
  if (all.length < 2) continue;
  const bar = document.createElement('label'), input = document.createElement('input'), said = document.createElement('span');
  bar.className = 'step-to'; input.type = 'range'; input.min = 0; input.max = all.length - 1; input.value = 0;
  const show = () => { all.forEach((one, i) => one.classList.toggle('now', i === +input.value)); said.textContent = all[input.value].dataset.name; };
  input.addEventListener('input', show);
  bar.append('token ', input, said); box.before(bar); box.classList.add('one'); show();
}
"""
"""With it one token is shown at a time, by a slider; without it all of them, one below the other."""


def draw_reads(report: ReadReport, pictures: Sequence[Image]) -> str:
    """Returns a panel for the whole answer and one for each token.

    Args:
        report: of one answer.
        pictures: by number of the image in the text, as the model saw it: its grid is laid over the whole of it.
    """
    panels = [_panel(report, pictures, None)]
    panels += [_panel(report, pictures, token) for token in range(len(report.tokens))]
    return f'{_defined(pictures)}<div class="reads">{"".join(panels)}</div>'


def data_uri(picture: Image) -> str:
    """Returns a picture as a `data:` address."""
    file = io.BytesIO()
    picture.convert("RGB").save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def _defined(pictures: Sequence[Image]) -> str:
    """Returns the pictures once, for all panels to refer to."""
    symbols = []
    for number, picture in enumerate(pictures):
        width, height = _size(picture)
        image = f'<image href="{data_uri(picture)}" width="{width}" height="{height}" preserveAspectRatio="none"/>'
        symbols.append(f'<symbol id="picture-{number}" viewBox="0 0 {width} {height}">{image}</symbol>')  # fmt: skip
    return f'<svg width="0" height="0" aria-hidden="true" style="position:absolute">{"".join(symbols)}</svg>'


def _panel(report: ReadReport, pictures: Sequence[Image], token: int | None) -> str:
    mass = report.mass.mean(0) if token is None else report.mass[token]
    name = "the whole answer" if token is None else f"{token + 1} of {len(report.tokens)}"
    images = float(mass[[kind == "image" for kind in report.kinds]].sum())
    said = f"{name}: {_percent(images)} of the attention on the picture" if report.spans else name
    drawn = "".join(_picture(report, index, pictures, mass) for index in range(len(report.spans)))
    listed = "".join(_text_pages(report, mass))
    return (
        f'<section class="read" data-name="{_text(name)}"><p class="all">{_answer(report, token)}</p><p class="facts">{_text(said)}</p>'
        f'<div>{drawn}</div><ul class="pagelist">{listed}</ul></section>'
    )


def _answer(report: ReadReport, token: int | None) -> str:
    parts = []
    for place, own in enumerate(report.tokens):
        text = _text(own.text)
        parts.append(f"<mark>{text or '&middot;'}</mark>" if place == token else text)
    return "".join(parts)


def _picture(report: ReadReport, index: int, pictures: Sequence[Image], mass: torch.Tensor) -> str:
    span = report.spans[index]
    pages = [(page, float(mass[i])) for i, page in enumerate(report.pages) if page.span == index]
    most = max((share for _, share in pages), default=0.0) or 1.0
    width, height = (_SIDE, _SIDE) if span.image >= len(pictures) else _size(pictures[span.image])
    ground = "" if span.image >= len(pictures) else f'<use href="#picture-{span.image}" width="{width}" height="{height}"/>'  # fmt: skip
    tiles = "".join(_tile(page, share, most, span.grid, width, height) for page, share in pages)
    left = "".join(_unread(place, span.grid, width, height) for place in report.unread(index))
    title = f"picture {span.image + 1}, {span.grid.rows} x {span.grid.cols} patches in {len(pages)} pages"
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-label="{title}">{ground}{left}{tiles}</svg>'


def _tile(page: ReadPage, share: float, most: float, grid: Grid, width: int, height: int) -> str:
    boxes = [_box(own, grid, width, height) for own in _rectangles(page.places, grid)]
    if not boxes:
        return ""
    shown, label = _percent(share), ""
    x, y, w, h = max(boxes, key=lambda box: box[2] * box[3])
    if share >= 0.25 * most and min(w, h) >= 30:
        label = f'<text x="{x + w / 2:.1f}" y="{y + h / 2 + 4:.1f}" text-anchor="middle" font-size="11" fill="#fff" stroke="#000" stroke-width="2.5" paint-order="stroke">{shown}</text>'
    drawn = "".join(
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="#e4002b" fill-opacity="{0.6 * share / most:.3f}" '
        'stroke="#fff" stroke-opacity=".55" stroke-width="1"/>'
        for x, y, w, h in boxes
    )
    return f"<g><title>page {page.page_id}: {shown}</title>{drawn}{label}</g>"


def _rectangles(places: Sequence[int], grid: Grid) -> list[tuple[int, int, int, int]]:
    """Returns (row, column, end row, end column) of rectangles that cover these patches; newline tokens are nowhere."""
    rows: dict[int, list[int]] = {}
    for place in places:
        row, col = divmod(place, grid.width)
        if col < grid.cols:
            rows.setdefault(row, []).append(col)
    found: list[tuple[int, int, int, int]] = []
    for row, cols in sorted(rows.items()):
        start, end = min(cols), max(cols) + 1
        if found and found[-1][1::2] == (start, end) and found[-1][2] == row:
            found[-1] = (found[-1][0], start, row + 1, end)
        else:
            found.append((row, start, row + 1, end))
    return found


def _box(
    own: tuple[int, int, int, int], grid: Grid, width: int, height: int
) -> tuple[float, float, float, float]:
    row, col, end_row, end_col = own
    w, h = width / grid.cols, height / grid.rows
    return col * w, row * h, (end_col - col) * w, (end_row - row) * h


def _unread(place: int, grid: Grid, width: int, height: int) -> str:
    row, col = divmod(place, grid.width)
    if col >= grid.cols:
        return ""
    w, h = width / grid.cols, height / grid.rows
    return (
        f'<rect x="{col * w:.1f}" y="{row * h:.1f}" width="{w:.1f}" height="{h:.1f}" fill="#777" fill-opacity=".82">'
        "<title>not read</title></rect>"
    )


def _text_pages(report: ReadReport, mass: torch.Tensor) -> Iterator[str]:
    pages = [(page, float(mass[i])) for i, page in enumerate(report.pages) if page.kind == "text"]
    for page, share in sorted(pages, key=lambda own: -own[1])[:_TEXT_PAGES]:
        if share >= _LEAST:
            text = page.text if len(page.text) <= _SHOWN_LETTERS else page.text[:_SHOWN_LETTERS] + "..."  # fmt: skip
            yield f'<li title="page {page.page_id}"><b>{_percent(share)}</b><code>{_text(text)}</code></li>'


def _size(picture: Image) -> tuple[int, int]:
    scale = _SIDE / max(picture.size)
    return max(1, round(picture.width * scale)), max(1, round(picture.height * scale))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _text(text: str) -> str:
    return html.escape(text, quote=True)
