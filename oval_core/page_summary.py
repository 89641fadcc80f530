"""Summaries of pages: key bounds and means, hidden mean. Made from committed tokens only, when asked for.

A summary is derived from the pool, so truncate, reorder, fork and reset cannot leave a stale one: each page
counts its changes, and a summary made from another count is made again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from oval_core.kv_pool import KVPool
from oval_core.page_table import PageTable
from oval_core.pages import Page, SequencePages


@dataclass(frozen=True, slots=True)
class KeyBounds:
    """Elementwise bounds and mean of the keys of P pages, each [P, K, D] (Quest, arXiv 2406.10774).

    Attributes:
        page_ids: the pages, in the order of the sequence.
        lower: minimum, in the dtype of the cache.
        upper: maximum, in the dtype of the cache.
        mean: mean, float32.
    """

    page_ids: tuple[int, ...]
    lower: torch.Tensor
    upper: torch.Tensor
    mean: torch.Tensor


ReadKeys = Callable[[int, Sequence[Page], Sequence[Sequence[int]]], torch.Tensor]
"""Returns keys [K, n, D] of a layer at some slots of some pages, page after page."""

_Stamp = tuple[int, int]
"""(page version, committed tokens): what a summary was made from."""


class PageSummaries:
    """Summaries of the pages of a table, kept for as long as the page does not change."""

    def __init__(self, table: PageTable, pool: KVPool, read_keys: ReadKeys) -> None:
        self._table = table
        self._pool = pool
        self.read_keys = read_keys
        self._keys: dict[int, dict[int, tuple[_Stamp, tuple[torch.Tensor, ...]]]] = {}
        self._hidden: dict[int, tuple[_Stamp, tuple[torch.Tensor, ...]]] = {}

    def key_bounds(self, layer_idx: int, row: int) -> KeyBounds:
        """Returns the key bounds of a row's pages that hold a committed token."""

        def make(pages: Sequence[Page], slots: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
            keys = self.read_keys(layer_idx, pages, slots)
            keys = keys.view(keys.shape[0], len(pages), -1, keys.shape[2]).transpose(
                0, 1
            )  # [P, K, tokens, D]
            return keys.amin(2), keys.amax(2), keys.float().mean(2)

        kept = self._keys.setdefault(layer_idx, {})
        pages, (lower, upper, mean) = self._refresh(kept, row, make)
        return KeyBounds(tuple(page.page_id for page in pages), lower, upper, mean)

    def hidden_mean(self, row: int) -> torch.Tensor:
        """Returns the mean last hidden state [P, C] of a row's pages, float32; needs `track_hidden`."""
        hidden = self._pool.hidden
        assert hidden is not None, "hidden states are kept only with track_hidden"

        def make(_: Sequence[Page], slots: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
            return (hidden[torch.tensor(slots, device=hidden.device)].float().mean(1),)

        _, (mean,) = self._refresh(self._hidden, row, make)
        return mean

    def sequence(self, row: int) -> SequencePages:
        """Returns the pages of a row."""
        return self._table.sequences[row]

    def hidden_means(self, row: int, pages: Sequence[Page]) -> torch.Tensor:
        """Returns the mean last hidden state [n, C] of some of a row's pages, committed tokens only, float32."""
        hidden = self._pool.hidden
        assert hidden is not None, "hidden states are kept only with track_hidden"
        committed = self._table.sequences[row].num_committed
        means = []
        for page in pages:
            slots = [s for s, t in zip(page.slots, page.tokens, strict=True) if t < committed]
            means.append(hidden[torch.tensor(slots, device=hidden.device)].float().mean(0))
        return torch.stack(means)

    def last_hidden(self, row: int) -> torch.Tensor:
        """Returns the last hidden state [C] of a row's newest committed token; needs `track_hidden`."""
        hidden = self._pool.hidden
        assert hidden is not None, "hidden states are kept only with track_hidden"
        seq = self._table.sequences[row]
        newest = seq.num_committed - 1
        for page in reversed(seq.pages):
            if newest in page.tokens:
                return hidden[page.slots[page.tokens.index(newest)]]
        raise AssertionError("the row holds no committed token")

    def _refresh(
        self,
        kept: dict[int, tuple[_Stamp, tuple[torch.Tensor, ...]]],
        row: int,
        make: Callable[[Sequence[Page], Sequence[Sequence[int]]], tuple[torch.Tensor, ...]],
    ) -> tuple[list[Page], tuple[torch.Tensor, ...]]:
        committed = self._table.sequences[row].num_committed
        slots_of: dict[int, list[int]] = {}
        pages: list[Page] = []
        stale: dict[int, list[Page]] = defaultdict(list)  # by number of tokens
        for page in self._table.sequences[row].pages:
            slots = [s for s, t in zip(page.slots, page.tokens, strict=True) if t < committed]
            if not slots:
                continue
            pages.append(page)
            slots_of[page.page_id] = slots
            if page.page_id not in kept or kept[page.page_id][0] != (page.version, len(slots)):
                stale[len(slots)].append(page)
        for count, group in stale.items():
            made = make(group, [slots_of[page.page_id] for page in group])
            for i, page in enumerate(group):
                kept[page.page_id] = ((page.version, count), tuple(t[i] for t in made))
        self._forget_dead(kept)
        columns: Sequence[tuple[torch.Tensor, ...]] = [kept[p.page_id][1] for p in pages]
        assert columns, "the row holds no committed token"
        return pages, tuple(torch.stack(column) for column in zip(*columns, strict=True))

    def _forget_dead(self, kept: dict[int, tuple[_Stamp, tuple[torch.Tensor, ...]]]) -> None:
        if len(kept) > 2 * len(self._table.pages()):
            alive = {page.page_id for page in self._table.pages()}
            for page_id in kept.keys() - alive:
                del kept[page_id]
