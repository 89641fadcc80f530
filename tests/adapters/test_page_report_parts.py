"""The log of reads follows pages and rows; the drawing stands alone, escapes what it shows, and lays pages over pictures."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
import torch
from PIL import Image

from oval_adapters.page_report import ReadPage, ReadReport, ReadToken, draw_reads
from oval_adapters.page_report.drawing import _rectangles
from oval_adapters.page_report.read_log import ReadLog
from oval_core.pages import Page
from oval_core.repaging import Repaged
from oval_core.routing.mass_watch import SeenRow
from oval_mm.spans import Grid, ImageSpan


def seen(ids: tuple[int, ...], mass: torch.Tensor) -> SeenRow:
    """What queries read: mass [W, Y, P]."""
    read = torch.ones(mass.shape[1:], dtype=torch.bool)
    return SeenRow(ids, mass, mass, read, torch.zeros(mass.shape[1], len(mass), 1, 1))


def page(page_id: int, tokens: list[int]) -> Page:
    return Page(page_id, 0, 32, slots=list(tokens), tokens=list(tokens))


def test_layers_are_averaged_by_group() -> None:
    log = ReadLog([[0, 1], [2]])
    mass = torch.tensor([[[0.5, 0.5], [1.0, 0.0], [0.2, 0.8]]])
    log.note(1, 7, seen((3, 4), mass))
    own = log.read(1, 7)
    assert own is not None
    assert own.page_ids == (3, 4)
    assert torch.allclose(own.mass, torch.tensor([[0.75, 0.25], [0.2, 0.8]]))
    assert log.read(1, 6) is None
    assert log.read(0, 7) is None
    assert log.read(5, 7) is None


def test_pages_that_go_share_out_what_they_got_by_their_tokens() -> None:
    log = ReadLog([[0]])
    log.note(0, 9, seen((1, 2, 3), torch.tensor([[[0.4, 0.4, 0.2]]])))
    old = (page(1, [0, 1, 2, 3]), page(2, [4, 5]))
    log.repage(0, [Repaged(old, (page(8, [0]), page(9, [1, 2, 3, 4, 5])))])
    own = log.read(0, 9)
    assert own is not None
    assert own.page_ids == (3, 8, 9)
    assert torch.allclose(own.mass, torch.tensor([[0.2, 0.1, 0.7]]))


def test_rows_are_reordered_copied_and_forgotten() -> None:
    log = ReadLog([[0]])
    log.note(0, 3, seen((1,), torch.ones(1, 1, 1)))
    log.note(1, 4, seen((2,), torch.ones(1, 1, 1)))
    log.reorder([1, 1])
    twin = log.copy()
    log.note(0, 5, seen((2,), torch.ones(1, 1, 1)))
    assert log.read(1, 5) is None
    assert twin.read(0, 5) is None
    assert twin.read(1, 4) is not None
    assert twin.read(1, 3) is None
    log.reset()
    assert log.read(0, 4) is None


def report(text: str = "<b>&") -> ReadReport:
    """Two tokens, a page of text, and a picture of 2 x 3 patches with newline tokens, one column of it unread."""
    grid = Grid(2, 3, newline=True)
    pages = (
        ReadPage(page_id=1, kind="text", columns=(0, 1), text=text),
        ReadPage(page_id=2, kind="image", columns=(2, 3, 6, 7), span=0, places=(0, 1, 4, 5)),
    )
    mass = torch.tensor([[0.3, 0.7], [1.0, 0.0]])
    return ReadReport(
        tokens=(ReadToken(token_id=5, text="</script>", column=10), ReadToken(token_id=6, text="", column=11)),
        pages=pages,
        spans=(ImageSpan(2, grid.size, 0, grid),),
        mass=mass,
        by_group=mass[None],
        groups=((0,),),
    )  # fmt: skip


class Tags(HTMLParser):
    """Counts tags, and checks that each is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_drawing_is_whole_and_escaped() -> None:
    drawn = draw_reads(report(), [Image.new("RGB", (30, 20), (9, 9, 9))])
    tags = Tags()
    tags.feed(drawn)
    assert tags.open == []
    kinds = [tag for tag, _ in tags.attributes]
    assert kinds.count("section") == 3
    assert "script" not in kinds
    assert "b" in kinds
    assert "&lt;/script&gt;" in drawn
    assert "&lt;b&gt;&amp;" in drawn
    assert "<mark>&middot;</mark>" in drawn
    assert drawn.count("data:image/png;base64,") == 1
    assert "http" not in drawn


def test_tiles_lie_over_their_patches_and_unread_ones_are_grey() -> None:
    tags = Tags()
    tags.feed(draw_reads(report(), [Image.new("RGB", (30, 20))]))
    boxes = [own for tag, own in tags.attributes if tag == "rect"]
    tile = next(own for own in boxes if own["fill"] == "#e4002b")
    assert [float(tile[k] or 0) for k in ("x", "y", "width", "height")] == [0.0, 0.0, 224.0, 224.0]
    grey = [own for own in boxes if own["fill"] == "#777"]
    assert len(grey) == 2 * 3
    assert {own["x"] for own in grey} == {"224.0"}
    assert report().unread(0) == (2, 3, 6, 7)


def test_a_page_that_ends_within_a_row_covers_no_more_than_its_patches() -> None:
    assert _rectangles((0, 1, 2, 4, 5), Grid(2, 3, newline=True)) == [(0, 0, 1, 3), (1, 0, 2, 2)]
    assert _rectangles((0, 1, 3, 4), Grid(2, 3)) == [(0, 0, 2, 2)]
    assert _rectangles((3, 7), Grid(2, 3, newline=True)) == []


def test_a_picture_that_is_not_at_hand_is_a_plain_ground() -> None:
    drawn = draw_reads(report(), [])
    assert "<use" not in drawn
    assert "<rect" in drawn
    assert draw_reads(report("x" * 500), []).count("x" * 160 + "...") == 3


def test_shares_of_the_picture_are_told() -> None:
    drawn = draw_reads(report(), [])
    assert "1 of 2: 70.0 % of the attention on the picture" in drawn
    assert report().top(0, 1) == [(1, pytest.approx(0.7))]
