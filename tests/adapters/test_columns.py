"""Rows that accept different numbers of tokens keep their own columns."""

from __future__ import annotations

import torch

from oval_adapters.columns import ColumnMap


def columns_of(columns: ColumnMap, row: int) -> list[int]:
    places = columns.places(row)
    return list(range(columns.length)) if places is None else places.tolist()


def test_rows_of_equal_length_grow_apart_and_meet() -> None:
    columns = ColumnMap()
    columns.request(None, 2, 4)
    columns.commit(4)
    for counts, lengths in (([2, 2], [6, 6]), ([1, 3], [7, 9]), ([0, 0], [7, 9]), ([2, 0], [9, 9])):
        columns.hold(counts, max(counts))
        columns.accept(counts)
        assert columns.length == max(lengths)
        assert [columns_of(columns, row) for row in range(2)] == [list(range(n)) for n in lengths]


def test_new_tokens_of_a_tree_lie_by_depth_behind_a_hole() -> None:
    columns = ColumnMap()
    columns.request(torch.tensor([[1, 0, 1, 1]]), 1, 4)
    columns.commit(4)
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    (request,) = columns.hold([tree], 3, with_columns=True)
    assert request.positions is not None
    assert request.positions.tolist() == [0, 2, 3, 4, 5, 5]
