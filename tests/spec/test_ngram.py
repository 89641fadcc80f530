"""Prompt lookup against looking at every place of the text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_spec import reference_ngram, token_paths

from oval_core.errors import ConfigError
from oval_spec.drafter import DraftRequest
from oval_spec.ngram import LEAST_CHANCE, MAX_MATCHES, NgramDrafter


def request(ids: list[int], row: int = 0, depth: int = 5, nodes: int = 16) -> DraftRequest:
    return DraftRequest(row=row, ids=ids, hidden=None, max_depth=depth, max_nodes=nodes)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    st.tuples(st.integers(1, 120), st.integers(2, 4), st.randoms(use_true_random=False)).map(
        lambda text: [text[2].randrange(text[1]) for _ in range(text[0])]
    ),
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 4),
    st.integers(0, 6),
    st.integers(0, 14),
)
def test_finds_what_every_place_says(
    text: list[int], steps: list[int], least: int, more: int, own: int, depth: int, nodes: int
) -> None:
    drafter = NgramDrafter(ngram_max=least + more, ngram_min=least, depth=own)
    end = len(text) // 2 + 1
    for step in [0, *steps]:
        end = min(end + step, len(text))
        ids = text[:end]
        found = drafter.find(request(ids, depth=depth, nodes=nodes))
        chances, expected = reference_ngram(ids, least + more, least, min(own, depth), MAX_MATCHES)
        assert found.length == expected
        assert found.tree.tokens[0] == ids[-1]
        paths = [path[1:] for path in token_paths(found.tree)]
        assert found.chances[1:] == pytest.approx([chances[path] for path in paths[1:]])
        assert list(found.chances) == sorted(found.chances, reverse=True)
        left = [chance for path, chance in chances.items() if path not in paths]
        if len(found.tree) < nodes:
            assert all(chance < LEAST_CHANCE for chance in left)
        assert all(chance <= found.chances[-1] + 1e-12 for chance in left)
        assert len(found.tree) <= max(1, nodes)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=5))
def test_a_changed_text_and_other_rows_leave_no_trace(texts: list[list[int]]) -> None:
    drafter = NgramDrafter(ngram_max=3, ngram_min=1, depth=4)
    for row in (0, 1, 0):
        for ids in texts:
            fresh = NgramDrafter(ngram_max=3, ngram_min=1, depth=4)
            assert drafter.draft([request(ids, row)]) == fresh.draft([request(ids, row)])
    drafter.reset()
    assert drafter.draft([request([1, 2])])[0].tree.tokens == (2,)


def test_the_longest_run_decides() -> None:
    # After (1, 2, 3) came 7; after (2, 3) alone came 8, later and twice.
    ids = [1, 2, 3, 7, 9, 2, 3, 8, 0, 2, 3, 8, 5, 1, 2, 3]
    long = NgramDrafter(ngram_max=3, ngram_min=2, depth=1)
    assert long.find(request(ids)).tree.tokens == (3, 7)
    assert long.find(request(ids)).length == 3
    short = NgramDrafter(ngram_max=2, ngram_min=2, depth=1)
    assert short.find(request(ids)).tree.tokens == (3, 8, 7)
    assert short.find(request(ids, nodes=2)).tree.tokens == (3, 8)


def test_what_came_more_often_beats_what_came_last() -> None:
    ids = [4, 4, 1, 0, 4, 4, 1, 5, 4, 4, 2, 6, 4, 4]
    drafter = NgramDrafter(ngram_max=2, ngram_min=2, depth=2)
    tree = drafter.find(request(ids, nodes=4)).tree
    assert token_paths(tree) == [(4,), (4, 1), (4, 2), (4, 2, 6)]


def test_of_equally_frequent_ones_the_latest_is_first() -> None:
    ids = [4, 4, 1, 0, 4, 4, 2, 0, 4, 4]
    drafter = NgramDrafter(ngram_max=2, ngram_min=2, depth=2)
    tree = drafter.find(request(ids)).tree
    assert token_paths(tree) == [(4,), (4, 2), (4, 1), (4, 2, 0), (4, 1, 0)]


def test_a_text_of_one_token_takes_bounded_work() -> None:
    drafter = NgramDrafter(ngram_max=4, ngram_min=2, depth=5)
    ids = [3] * 8000
    found = drafter.find(request(ids))
    assert found.length == 4
    assert found.tree.tokens == (3,) * 6, "the latest places end early, those before say more"
    assert found.chances[5] > 0.9, "it was so every time"
    index = drafter._rows[0]
    assert len(index.earlier()[1]) == MAX_MATCHES
    # What a step adds to the index is one entry a length of run, whatever the text's length.
    ids.append(3)
    index.extend(ids)
    assert {len(before) for before in index._before.values()} == {8002}


@pytest.mark.parametrize("sizes", [(2, 3, 5), (2, 0, 5), (2, 1, 0)])
def test_sizes_that_make_no_sense_are_refused(sizes: tuple[int, int, int]) -> None:
    longest, shortest, depth = sizes
    with pytest.raises(ConfigError, match="ngram drafter"):
        NgramDrafter(ngram_max=longest, ngram_min=shortest, depth=depth)


def test_runs_that_came_once_take_no_memory_of_their_own() -> None:
    ids = list(range(3000)) + [7, 8, 9, 5000, 8, 9]
    drafter = NgramDrafter(ngram_max=8, ngram_min=1, depth=2)
    assert drafter.find(request(ids)).tree.tokens[:2] == (9, 5000), "of two places the latest"
    index = drafter._rows[0]
    assert sum(map(len, index._latest.values())) < 3000 + 20, "one entry a token, not eight"
    ids += [4000, 7, 8]
    assert drafter.find(request(ids)).length == 2
    assert drafter.find(request([*ids, 9])).length == 3, "noted when (8, 9) came again"
