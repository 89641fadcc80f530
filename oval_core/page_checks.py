"""Checks the pages of a batch: what must hold of them after every step. For tests; it changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from oval_core.config import MAX_PAGE_SIZE
from oval_core.pages import SequencePages, runs_of


def check_pages(sequences: Sequence[SequencePages]) -> None:
    """Raises AssertionError if an invariant of the pages of these sequences does not hold."""
    refs: dict[int, int] = {}
    for seq in sequences:
        tokens = sorted(token for page in seq.pages for token in page.tokens)
        assert tokens == list(range(seq.length)), "pages do not partition the tokens"
        assert 0 <= seq.num_committed <= seq.length
        assert all(page.sealed for page in seq.pages[:-1]), "an open page is not the last"
        for page in seq.pages:
            refs[page.page_id] = refs.get(page.page_id, 0) + 1
        walked = runs_of(seq.pages, seq.num_committed)
        assert seq.runs() == walked, "remembered runs are stale"
    owner: dict[int, int] = {}
    for page in {page.page_id: page for seq in sequences for page in seq.pages}.values():
        region = range(page.base, page.base + page.capacity)
        assert page.num_refs == refs[page.page_id], "wrong reference count"
        assert page.sealed or page.num_refs == 1, "an open page is shared"
        assert 1 <= len(page) <= page.capacity <= MAX_PAGE_SIZE
        assert len(set(page.slots)) == len(page) == len(page.tokens)
        assert all(slot in region for slot in page.slots)
        assert not owner.keys() & set(region), "a slot belongs to two pages"
        owner.update(dict.fromkeys(region, page.page_id))
