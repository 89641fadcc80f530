"""Prompts with images on fast memory that holds little: where they are cut, and that the text is that of Hugging Face."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from prefill_world import config, inputs, masked
from tiny_models import assert_same_run, one_thread, prompt, run
from tiny_towers import TOKENS, images, parts_model, rows_of, tower_model

from oval_adapters import attach
from oval_adapters.pieces import split_call
from oval_adapters.vision.feature_cache import ImageFeatures
from oval_adapters.vision.piece_ends import PieceEnds
from oval_adapters.vision.placement import ImagePart, ImageView, Parts
from oval_mm.spans import Grid
from oval_mm.tiles import tile_pages

_one_thread = pytest.fixture(autouse=True)(one_thread)
N = TOKENS["clip"]


class Paged:
    """A cache of which only the numbers count: half of the pool for each row, and all of it for what a piece takes."""

    image_tile = 4

    def __init__(self, pool: int, page: int = 4) -> None:
        self.tiers = self.memory = self
        self._pool, self._page = pool, page
        self.asked: list[list[list[int]]] = []

    def half_a_row(self, rows: int) -> int:
        return self._pool // 2 // rows

    def max_new_tokens(self, rows: int) -> int:
        return max(1, self.half_a_row(rows) // self._page * self._page)

    def takes(self, rows: list[list[int]]) -> bool:
        self.asked.append(rows)
        return sum(map(sum, rows)) <= self._pool


def row_of(*places: tuple[int, Grid], first: int = 0) -> Parts:
    empty = torch.zeros(0, 1)
    return tuple(
        ImagePart(column, grid.size - first, first, ImageView(grid, empty, None, object(), ImageFeatures(empty, None, (grid,))))
        for column, grid in places
    )  # fmt: skip


def ends_of(paged: Paged, num_queries: int, *rows: Parts, unread: Any = None) -> list[int]:
    ends, found = PieceEnds(paged, len(rows), num_queries, rows, unread), [0]
    while found[-1] < num_queries:
        found.append(ends.after(found[-1]))
    return found[1:]


def test_text_is_cut_into_whole_pages() -> None:
    assert ends_of(Paged(26), 30, ()) == [12, 24, 30]
    assert ends_of(Paged(6), 3, (), ()) == [1, 2, 3]


def test_an_image_that_fits_is_not_cut() -> None:
    square = Grid(4, 5)
    assert ends_of(Paged(52), 60, row_of((10, square), (30, square))) == [10, 30, 56, 60]
    assert ends_of(Paged(52), 60, row_of((10, square)), ()) == [10, 23, 36, 49, 60], (
        "of two rows it does not fit"
    )


def test_a_larger_one_is_cut_between_rows_of_tiles() -> None:
    grid = Grid(9, 4, newline=True)  # tiles of 3 rows of 4, and the newlines
    assert [page[-1] for page in tile_pages(grid)] == [14, 29, 44]
    assert ends_of(Paged(64), 60, row_of((7, grid))) == [22, 54, 60]
    assert ends_of(Paged(20), 60, row_of((7, grid))) == [7, 17, 22, 32, 37, 47, 57, 60]
    assert ends_of(Paged(64), 45, row_of((0, grid), first=10)) == [20, 45], (
        "what came before is in the cache"
    )


def test_rows_are_cut_where_no_row_has_a_tile_cut() -> None:
    a, b = row_of((0, Grid(8, 4))), row_of((16, Grid(8, 4)))
    assert ends_of(Paged(80), 64, a, b) == [16, 32, 52, 64]


def test_only_what_is_read_counts() -> None:
    paged, part = Paged(40), row_of((3, Grid(4, 4)))
    unread = torch.zeros(1, 30, dtype=torch.bool)
    unread[0, 5:19] = True
    assert ends_of(paged, 30, part, unread=unread) == [20, 30]
    assert paged.asked[0] == [[3, 2, 1]]
    unread[0, 3:19] = True
    ends_of(paged, 30, part, unread=unread)
    assert paged.asked[-2] == [[4]]


def test_ends_are_asked_for_as_pieces_run() -> None:
    ids, done = torch.arange(20)[None], [0]

    def end_of(start: int) -> int:
        assert start == done[-1]
        return min(start + 5 + len(done), 20)

    for start, end, piece in split_call({"input_ids": ids, "x": 3}, 20, end_of, 4):
        assert piece["input_ids"].tolist() == [list(range(start, end))]
        done.append(end)
    assert done == [0, 6, 13, 20]


ROWS = {
    "one": ([[2, 5, 6]], 2),
    "three": ([[2, 5, 6], [9, 3], [4, 4]], 4),
    "with text alone": ([[12], [0, 0, 4]], 2),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(("fast", "page_size"), [(38, 4), (60, 4), (96, 16), (120, 16)])
def test_as_little_memory_as_is_allowed_is_enough(name: str, fast: int, page_size: int) -> None:
    model, (layouts, count) = tower_model("clip"), ROWS[name]
    inputs = {**rows_of(layouts, N), "pixel_values": images(count), "max_new_tokens": 6}
    want = run(model, **inputs)
    with attach(model, {"page_size": page_size, "tiers": {"fast_tokens": fast}}) as oval:
        got = run(model, **inputs)
        assert_same_run(got, want)
        assert oval.stats()["tiers"]["bytes_stored"] > 0
        assert [len(row) for row in got.cache.images] == [len(own) - 1 for own in layouts]
        for own in (image for row in got.cache.images for image in row):
            assert own.span.length == N
            assert own.features.shape[0] == N


@pytest.mark.parametrize("kind", ["next", "onevision"])
def test_pages_of_pieces_are_those_of_one_forward(kind: str) -> None:
    """Fast memory for a row of tiles, not for an image: its pages are whole tiles still."""
    model = parts_model(kind)
    ids, sizes = prompt(6), torch.tensor([[80, 40]])
    pixels = torch.randn(1, 3, 3, 40, 40, generator=torch.Generator().manual_seed(3))
    count = len(model.get_image_features(pixels, image_sizes=sizes).pooler_output[0])
    ids = torch.cat(
        [ids[:, :3], torch.full((1, count), model.config.image_token_id), ids[:, 3:]], 1
    )
    inputs = {"input_ids": ids, "pixel_values": pixels, "image_sizes": sizes, "max_new_tokens": 5}
    want = run(model, **inputs)
    pages = []
    for settings in ({}, {"tiers": {"fast_tokens": 90}}):
        with attach(model, {"page_size": 4, **settings}) as oval:
            assert_same_run(run(model, **inputs), want)
            pages.append(oval.stats()["vision"]["image_pages"])
    assert pages[0] == pages[1] > 4


def test_a_later_turn_with_an_image_and_a_budget_on_little_memory() -> None:
    model, told = tower_model("clip"), inputs([[3, 4, 6], [2, 5]])
    with attach(model, config(0.4, tiers={"fast_tokens": 44})) as oval:
        got = run(model, **told)
        width = told["input_ids"].shape[1]
        want_of = masked(told, got.cache)
        assert bool(got.cache.unread_columns(0, 0, width).any())
        oval.read_images(got.cache)
        assert not bool(got.cache.unread_columns(0, 0, width).any())
    assert_same_run(got, run(model, **want_of))
