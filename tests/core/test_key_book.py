"""`KeyBook` by itself: one product scores every page, and no summary outlives its page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oval_core.pages import Page, SequencePages
from oval_core.routing.key_book import KeyBook
from oval_core.routing.key_signals import create_signal

LAYERS, KV, HEADS, DIM = (1, 3), 2, 4, 8
NAMES = ("quest", "estimate", "sketch")


class Text:
    """A sequence over a table of keys; a slot's key never changes, a page may get other slots."""

    def __init__(self, seed: int = 0) -> None:
        made = torch.Generator().manual_seed(seed)
        self.keys = torch.randn(4, KV, 400, DIM, generator=made)
        self.seq = SequencePages()
        self.reads = 0
        self.next_id = self.next_slot = 0

    def add(self, size: int, sealed: bool = True, at: int | None = None) -> None:
        page = Page(self.next_id, self.next_slot, size, sealed=sealed)
        page.slots = list(range(self.next_slot, self.next_slot + size))
        self.next_id, self.next_slot = self.next_id + 1, self.next_slot + size
        self.seq.pages.insert(len(self.seq.pages) if at is None else at, page)
        self.number()

    def number(self) -> None:
        first = 0
        for page in self.seq.pages:
            page.tokens = list(range(first, first + len(page)))
            first += len(page)
        self.seq.length = self.seq.num_committed = first

    def read(
        self, layer: int, pages: Sequence[Page], slots: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        self.reads += len(pages)
        return self.keys[layer][:, [slot for own in slots for slot in own]]


def new_book() -> KeyBook:
    return KeyBook(LAYERS, [create_signal(name, 0.4) for name in NAMES])


def check(book: KeyBook, text: Text) -> None:
    pages = [p for p in text.seq.pages if p.sealed and p.tokens[-1] < text.seq.num_committed]
    assert book.page_ids == [page.page_id for page in pages]
    assert book.counts.tolist() == [len(page) for page in pages]
    assert book.num_pages == len(pages)
    if not pages:
        return
    query = torch.randn(len(LAYERS), HEADS, DIM)
    for name in NAMES:
        fresh = KeyBook(LAYERS, [create_signal(name, 0.4)])
        fresh.refresh(text.seq, text.read)
        torch.testing.assert_close(book.scores(name, query), fresh.scores(name, query))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "open", "seal", "cut", "edit", "drop", "insert", "back"]),
        st.integers(0, 6),
    ),
    max_size=14,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(steps=STEPS)
def test_any_sequence_of_changes(steps: list[tuple[str, int]]) -> None:
    text, book = Text(), new_book()
    text.add(4)
    for name, number in steps:
        pages = text.seq.pages
        at = number % max(1, len(pages))
        if name == "add":
            text.add(1 + number)
        elif name == "open":
            text.add(1 + number, sealed=False)
        elif name == "insert":
            text.add(1 + number, at=at)
        elif name == "seal":
            for page in pages:
                page.sealed = True
        elif name == "cut":
            del pages[at:]
            text.number()
        elif pages and name == "edit" and len(pages[at]) > 1:
            pages[at].keep(range(len(pages[at]) - 1))
            text.number()
        elif pages and name == "drop":
            del pages[at]
            text.number()
        elif name == "back":
            text.seq.num_committed = max(0, text.seq.length - number)
        book.refresh(text.seq, text.read)
        check(book, text)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("queries", [(), (3,)])
def test_one_product_scores_all_layers_and_pages(name: str, queries: tuple[int, ...]) -> None:
    text, book = Text(), new_book()
    for size in (4, 4, 7, 1, 4):
        text.add(size)
    book.refresh(text.seq, text.read)
    query = torch.randn(len(LAYERS), *queries, HEADS, DIM)
    got, signal = book.scores(name, query), create_signal(name, 0.4)
    assert got.shape == (len(LAYERS), *queries, HEADS, 5)
    for place, layer in enumerate(LAYERS):
        alone = book.scores(name, query[place], place)
        torch.testing.assert_close(alone, got[place])
        for i, page in enumerate(text.seq.pages):
            keys = text.keys[layer][:, page.slots]
            want = signal.score(query[place], signal.summarise(keys)[:, None])
            torch.testing.assert_close(got[place][..., i], want[..., 0])


def test_a_page_is_read_once() -> None:
    text, book = Text(), new_book()
    for _ in range(6):
        text.add(4)
        book.refresh(text.seq, text.read)
        book.refresh(text.seq, text.read)
    assert text.reads == 6 * len(LAYERS)
    text.seq.pages[2].version += 1
    book.refresh(text.seq, text.read)
    assert text.reads <= 2 * 6 * len(LAYERS)
    del text.seq.pages[4:]
    text.number()
    before = text.reads
    book.refresh(text.seq, text.read)
    assert text.reads == before, "a cut makes nothing anew"


def test_an_error_while_reading_leaves_the_book_as_it_was() -> None:
    text, book = Text(), new_book()
    text.add(4)
    book.refresh(text.seq, text.read)
    text.add(4)

    def broken(layer: int, *args: Any) -> torch.Tensor:
        if layer == LAYERS[1]:
            raise OSError("gone")
        return text.read(layer, *args)

    with pytest.raises(OSError, match="gone"):
        book.refresh(text.seq, broken)
    assert book.num_pages == 1
    book.refresh(text.seq, text.read)
    check(book, text)


def test_a_copy_goes_its_own_way() -> None:
    text, book = Text(), new_book()
    text.add(4)
    text.add(4)
    book.refresh(text.seq, text.read)
    twin = book.clone()
    query = torch.randn(len(LAYERS), HEADS, DIM)
    before = book.scores("quest", query)
    del text.seq.pages[0]
    text.number()
    text.add(3)
    twin.refresh(text.seq, text.read)
    check(twin, text)
    assert book.num_pages == 2
    assert torch.equal(book.scores("quest", query), before)


def test_bytes_are_those_of_the_pages() -> None:
    text, book = Text(), new_book()
    assert book.num_bytes == 0
    for _ in range(5):
        text.add(4)
        book.refresh(text.seq, text.read)
    one = sum(create_signal(n, 0.4).summarise(text.keys[0][:, :4]).shape[-1] for n in NAMES)
    assert book.num_bytes == 5 * len(LAYERS) * KV * one * 4
