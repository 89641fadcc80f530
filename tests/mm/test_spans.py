"""Spans of images in a text: found by the sizes of the images, refused where these do not fit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oval_core.errors import ConfigError
from oval_mm.spans import Grid, ImageSpan, find_spans

IMAGE = 9
GRIDS = st.builds(Grid, st.integers(1, 5), st.integers(1, 5), st.booleans())


def test_images_between_texts_and_side_by_side() -> None:
    a, b = Grid(2, 2), Grid(1, 3)
    ids = [1, 2, *[IMAGE] * 4, 3, *[IMAGE] * 7, 5]
    assert find_spans(ids, IMAGE, [a, b, a]) == (
        ImageSpan(2, 4, 0, a),
        ImageSpan(7, 3, 1, b),
        ImageSpan(10, 4, 2, a),
    )


def test_an_image_of_several_grids() -> None:
    lone, grid = Grid(1, 1), Grid(2, 2, newline=True)
    spans = find_spans([*[IMAGE] * 7, 1, *[IMAGE] * 7], IMAGE, [[lone, grid], [lone, grid]])
    assert [(span.start, span.length, span.image) for span in spans] == [
        (0, 1, 0),
        (1, 6, 0),
        (8, 1, 1),
        (9, 6, 1),
    ]


def test_a_text_without_images() -> None:
    assert find_spans([1, 2, 3], IMAGE, []) == ()
    assert find_spans([], IMAGE, []) == ()


@pytest.mark.parametrize(
    ("ids", "grids"),
    [
        ([IMAGE] * 3, [Grid(2, 2)]),
        ([IMAGE] * 4, []),
        ([1, 2], [Grid(1, 1)]),
        ([IMAGE] * 5, [Grid(2, 2)]),
        ([IMAGE, IMAGE, 1, IMAGE, IMAGE], [Grid(2, 2)]),
        ([IMAGE, 1, IMAGE, IMAGE], [Grid(1, 2), Grid(1, 1)]),
    ],
)
def test_images_that_do_not_fit_are_refused(ids: list[int], grids: list[Grid]) -> None:
    with pytest.raises(ConfigError, match="Allowed"):
        find_spans(ids, IMAGE, grids)


@pytest.mark.parametrize("shape", [(0, 2), (2, 0), (-1, 2), (1.5, 2), (True, 2)])
def test_a_grid_has_rows_and_columns(shape: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="grid"):
        Grid(*shape)


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 4), st.lists(GRIDS, max_size=3)), max_size=5))
def test_any_text_is_taken_apart_as_it_was_put_together(
    rows: list[tuple[int, list[Grid]]],
) -> None:
    ids: list[int] = []
    want, images = [], []
    for length, grids in rows:
        ids += [1] * length
        for grid in grids:
            want.append(ImageSpan(len(ids), grid.size, len(images), grid))
            images.append(grid)
            ids += [IMAGE] * grid.size
    assert list(find_spans(ids, IMAGE, images)) == want
