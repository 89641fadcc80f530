"""`RowMemory` by itself: what counts, when, and for which pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oval_core.pages import Page, SequencePages
from oval_core.routing.cooccurrence import CooccurrenceGraph
from oval_core.routing.mass_watch import SeenRow
from oval_core.routing.row_memory import RowMemory, Standing


def sequence(pages: dict[int, int], num_committed: int | None = None) -> SequencePages:
    """Pages of these ids and sizes."""
    seq, first = SequencePages(), 0
    for page_id, size in pages.items():
        page = Page(page_id, first, size, sealed=True)
        page.slots = page.tokens = list(range(first, first + size))
        seq.pages.append(page)
        first += size
    seq.length = first
    seq.num_committed = first if num_committed is None else num_committed
    return seq


def seen(page_ids: Sequence[int], num: int, read: torch.Tensor | None = None) -> SeenRow:
    mass = torch.rand(num, 1, len(page_ids))
    everything = torch.ones(1, len(page_ids), dtype=torch.bool)
    queries = torch.randn(2, num, 4, 8)
    return SeenRow(tuple(page_ids), mass, mass + 1, everything if read is None else read, queries)


def test_columns_belong_to_the_pages_of_the_text_in_its_order() -> None:
    memory = RowMemory(1, None, None)
    first = seen([7, 5, 9], 1)  # in the order of reading
    memory.note(first, 12)
    memory.settle(sequence({5: 4, 7: 4, 9: 4}))
    assert torch.equal(memory.history.last, first.mass[0][:, [1, 0, 2]])
    memory.settle(sequence({9: 4, 11: 4, 5: 4}))
    want = torch.tensor([[first.mass[0, 0, 2], 0.0, first.mass[0, 0, 1]]])
    assert torch.equal(memory.history.last, want)
    assert memory.history.steps.tolist() == [[1, 0, 1]]


def test_nothing_counts_twice_and_nothing_before_it_is_known_to_stay() -> None:
    memory, text = RowMemory(1, None, None), sequence({1: 4, 2: 4})
    memory.note(seen([1, 2], 3), 8)
    assert memory.history.last.shape == (1, 0)
    text.num_committed = 6  # one of three was taken back... and one more
    memory.settle(text)
    assert memory.history.steps.tolist() == [[1, 1]]
    assert memory._newest == 5
    memory.settle(text)
    assert memory.history.steps.tolist() == [[1, 1]]


def test_the_newest_query_is_that_of_the_last_token_that_stayed() -> None:
    memory, text = RowMemory(1, None, None), sequence({1: 4, 2: 4})
    what = seen([1, 2], 4)
    memory.note(what, 8)
    text.num_committed = 7
    memory.settle(text)
    assert torch.equal(memory.queries, what.queries[:, 2])
    memory.standing = Standing((frozenset({1}),), 9)
    text.num_committed = 6
    memory.settle(text)
    assert memory.queries is None
    assert memory.standing is None


def test_a_cut_to_before_all_that_was_watched() -> None:
    memory, text = RowMemory(1, None, None), sequence({1: 4, 2: 4, 3: 4})
    memory.note(seen([1], 1), 4)
    text.num_committed = 4
    memory.settle(text)
    assert memory.queries is not None
    memory.note(seen([1, 2, 3], 2), 12)  # tokens 4..11, of which the last two were watched
    text.num_committed = 9
    memory.settle(text)
    assert memory.history.steps.tolist() == [[1, 0, 0]]
    assert memory.queries is None, "the query of token 3 is not that of token 8"


def test_pages_that_matter_are_counted_together() -> None:
    graph = CooccurrenceGraph(rebuild_every=1)
    memory = RowMemory(1, None, graph)
    read = torch.tensor([[True, True, False, True]])
    mass = torch.tensor([[[0.5, 0.3, 0.0, 0.2]]])
    what = SeenRow((1, 2, 3, 4), mass, mass, read, torch.randn(2, 1, 4, 8))
    memory.note(what, 16)
    memory.settle(sequence({1: 4, 2: 4, 3: 4, 4: 4}))
    assert graph.counts() == {(1, 2): 1, (1, 4): 1, (2, 4): 1}, "nobody read page 3"
    memory.settle(sequence({1: 4, 2: 4}))
    assert graph.counts() == {(1, 2): 1}


def test_no_more_than_eight_pages_make_pairs() -> None:
    graph = CooccurrenceGraph(rebuild_every=1)
    memory, what = RowMemory(1, None, graph), seen(range(12), 1)
    memory.note(what, 24)
    memory.settle(sequence(dict.fromkeys(range(12), 2)))
    best = set(what.mass[0, 0].topk(8).indices.tolist())
    assert {i for pair in graph.counts() for i in pair} == best


def test_looking_ahead_and_forks_change_nothing() -> None:
    memory = RowMemory(1, None, CooccurrenceGraph(rebuild_every=1))
    text = sequence({1: 4, 2: 4})
    memory.note(seen([1, 2], 2), 8)
    memory.ahead().settle(text)
    memory.clone().settle(text)
    assert memory.history.last.shape == (1, 0)
    assert memory.graph.counts() == {}
    assert memory.queries is None
    memory.settle(text)
    assert memory.history.steps.tolist() == [[2, 2]]


def test_the_recent_mass_of_pages_is_the_mean_over_groups() -> None:
    memory = RowMemory(2, None, None)
    mass = torch.tensor([[[0.2, 0.8], [0.6, 0.4]]])
    everything = torch.ones(2, 2, dtype=torch.bool)
    memory.note(SeenRow((1, 2), mass, mass, everything, torch.randn(2, 1, 4, 8)), 8)
    memory.settle(sequence({1: 4, 2: 4}))
    torch.testing.assert_close(memory.history_mass(3), torch.tensor([0.4, 0.6, 0.0]))
