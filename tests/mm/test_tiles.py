"""Tiles of a grid: a partition into rectangles of 1..32 tokens without slivers, newline tokens with their row."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oval_core.errors import ConfigError
from oval_core.vision_config import VisionConfig
from oval_mm.spans import Grid
from oval_mm.tiles import tile_pages

GRIDS = st.builds(Grid, st.integers(1, 30), st.integers(1, 30), st.booleans())


def test_the_grid_of_llava_is_36_pages_of_16() -> None:
    pages = tile_pages(Grid(24, 24))
    assert len(pages) == 36
    assert pages[0] == [row * 24 + col for row in range(4) for col in range(4)]
    assert pages[7] == [row * 24 + col for row in range(4, 8) for col in range(4, 8)]


def test_a_ragged_grid_has_no_slivers() -> None:
    assert [len(page) for page in tile_pages(Grid(5, 5))] == [9, 6, 6, 4]
    assert {len(page) for page in tile_pages(Grid(27, 27))} == {16, 12, 9}


def test_newline_tokens_join_the_last_tile_of_their_row() -> None:
    left, right = (
        tile_pages(Grid(2, 8, newline=True), 2)[0],
        tile_pages(Grid(2, 4, newline=True))[0],
    )
    assert left == [0, 1, 9, 10]
    assert right == list(range(10))


def test_low_and_narrow_grids_have_longer_tiles() -> None:
    assert [len(page) for page in tile_pages(Grid(1, 64))] == [16] * 4
    assert [len(page) for page in tile_pages(Grid(64, 1))] == [16] * 4
    assert [len(page) for page in tile_pages(Grid(2, 16))] == [16, 16]


@settings(max_examples=200, deadline=None)
@given(grid=GRIDS, tile=st.integers(1, 5))
def test_tiles_partition_the_grid_into_rectangles(grid: Grid, tile: int) -> None:
    pages = tile_pages(grid, tile)
    assert sorted(place for page in pages for place in page) == list(range(grid.size))
    assert [page[0] for page in pages] == sorted(page[0] for page in pages)
    shapes = []
    for page in pages:
        assert page == sorted(page)
        assert 1 <= len(page) <= VisionConfig(tile=tile).page_tokens <= 32
        patches = [divmod(place, grid.width) for place in page]
        kept = [(row, col) for row, col in patches if col < grid.cols]
        rows, cols = {row for row, _ in kept}, {col for _, col in kept}
        assert len(rows) * len(cols) == len(kept), "no rectangle"
        lines = {row for row, col in patches if col == grid.cols}
        assert lines == (rows if grid.newline and grid.cols - 1 in cols else set())
        shapes.append((len(rows), len(cols)))
    for sides in zip(*shapes, strict=True):
        assert max(sides) - min(sides) <= 1, "a sliver is left"
    if grid.rows >= tile and grid.cols >= tile:
        assert max(high for high, _ in shapes) <= tile
        assert max(wide for _, wide in shapes) <= tile


@pytest.mark.parametrize("tile", [0, 6, -1, 2.0, True, "4", None])
def test_tiles_that_make_no_page_are_refused(tile: object) -> None:
    with pytest.raises(ConfigError, match="tile"):
        tile_pages(Grid(2, 2), tile)
