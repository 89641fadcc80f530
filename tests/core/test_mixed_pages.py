"""Texts and images in one forward: an image has pages of its own, whatever the layout; nothing else is in them."""

from __future__ import annotations

from collections.abc import Sequence

from core.page_machine import CheckedTable
from hypothesis import given, settings
from hypothesis import strategies as st

from oval_core.mixed_pages import append_row, row_regions
from oval_core.values import ImageSet, RowRequest

Part = int | list[list[int]]


def request_of(parts: Sequence[Part]) -> RowRequest:
    """Texts (their lengths) and images (their groups) as a forward brings them."""
    count, images = 0, []
    for part in parts:
        if isinstance(part, int):
            count += part
        else:
            images.append(ImageSet(count, tuple(tuple(group) for group in part)))
            count += images[-1].size
    return RowRequest(count, images=tuple(images))


class MixedTable(CheckedTable):
    """Appends texts and images of all rows at once."""

    def forward(self, rows: Sequence[Sequence[Part]], reserve: int = 0) -> list[list[int]]:
        """Returns the sizes of the regions that were asked for, by row."""
        requests = [request_of(parts) for parts in rows]
        regions = [row_regions(self.table, row, own) for row, own in enumerate(requests)]
        self.make_room([size for own in regions for size in own], reserve)
        for row, request in enumerate(requests):
            used = self._used_slots()
            before = self.table.num_used
            ids = self._new_ids(request.num_new)
            for image in request.images:
                self.num_images += 1
                own = ids[image.first : image.first + image.size]
                self.image_of.update(dict.fromkeys(own, self.num_images))
            self._write(append_row(self.table, row, request), ids, used)
            assert self.table.num_used - before == sum(regions[row]), "other regions than told"
            self.model.append(row, ids)
        return regions


@st.composite
def images(draw: st.DrawFn) -> list[list[int]]:
    """A partition of a few tokens into pages of any size and order."""
    places = draw(st.permutations(range(draw(st.integers(1, 40)))))
    sizes = draw(st.lists(st.integers(1, 25), min_size=1, max_size=4))
    groups, start = [], 0
    while start < len(places):
        size = sizes[len(groups) % len(sizes)]
        groups.append(sorted(places[start : start + size]))
        start += size
    return groups


PARTS = st.lists(st.one_of(st.integers(1, 40), images()), max_size=5)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["commit", "reject", "crop", "reorder", "reset"]),
        st.lists(PARTS, min_size=3, max_size=3),
        st.integers(0, 200),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=80, deadline=None)
@given(page_size=st.sampled_from([1, 4, 16]), rows=st.integers(1, 3), steps=STEPS)
def test_pages_never_mix_text_with_images(
    page_size: int, rows: int, steps: list[tuple[str, list[list[Part]], int]]
) -> None:
    """`CheckedTable.check` looks at every page after every step."""
    checked = MixedTable(page_size, rows)
    for kind, parts, number in steps:
        checked.forward(parts[:rows], reserve=number % 50)
        checked.check()
        for row in checked.rows:
            count = checked.tentative(row)
            checked.commit(row, 0 if kind == "reject" else count)
        checked.check()
        if kind == "crop":
            for row in checked.rows:
                checked.truncate(row, number % (len(checked.model.tokens[row]) + 1))
        elif kind == "reorder":
            checked.reorder(
                [(number + row) % rows if row else number % rows for row in checked.rows]
            )
        elif kind == "reset":
            checked.reset(rows)
        checked.check()


def test_text_before_an_image_takes_no_more_slots_than_it_has() -> None:
    checked = MixedTable(16, 1)
    regions = checked.forward([[20, [[0, 2], [1, 3]], 3, [[0]], 2]])
    assert regions == [[16, 4, 2, 2, 3, 1, 16]]
    kinds = [(page.kind, len(page)) for page in checked.table.sequences[0].pages]
    assert kinds[:2] == [("text", 16), ("text", 4)]
    assert kinds[2:] == [("image", 2), ("image", 2), ("text", 3), ("image", 1), ("text", 2)]
    checked.commit(0, 30)
    assert checked.forward([[5, [[0, 1]]]]) == [[2]], "the open page takes the text"
    checked.check()


def test_rows_start_apart_also_with_images() -> None:
    checked = MixedTable(16, 2)
    checked.forward([[5, [list(range(20))], 3], [8]], reserve=96)
    first, second = (seq.pages for seq in checked.table.sequences)
    assert second[0].base == checked.table.num_slots // 2 // 16 * 16
    assert first[-1].base + first[-1].capacity <= second[0].base
