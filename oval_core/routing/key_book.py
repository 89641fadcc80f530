"""Summaries of the keys of one sequence's pages, all layers side by side, so that one product scores every page.

Made once for each sealed page, from committed tokens, when they commit: a page that has left fast memory by then or later
need not be read for them. Shapes: Y layers, K KV heads, H query heads, P pages, E length of a summary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from oval_core.page_summary import ReadKeys
from oval_core.pages import Page, SequencePages
from oval_core.routing.key_signals import KeySignal, Sketch
from oval_core.routing.sketch_kernel import sketch_scores

_Stamp = tuple[int, int]
"""(page id, version): what a summary was made from."""


class KeyBook:
    """Summaries of the sealed pages of a sequence, in its order. Follows truncate, fork and new layouts by page version."""

    def __init__(self, layers: Sequence[int], signals: Sequence[KeySignal]) -> None:
        self._layers = layers
        self._signals = {signal.name: signal for signal in signals}
        self._stamps: list[_Stamp] = []
        self._counts: list[int] = []
        self._held: dict[str, torch.Tensor] = {}  # [Y, K, at least P, E]
        self._token_bytes = 1  # of keys and values, a KV head

    @property
    def num_pages(self) -> int:
        """Pages that have a summary."""
        return len(self._stamps)

    @property
    def page_ids(self) -> list[int]:
        """The pages, in the order of the sequence."""
        return [page_id for page_id, _ in self._stamps]

    @property
    def counts(self) -> torch.Tensor:
        """Tokens of each page, long [P]."""
        return torch.tensor(self._counts, dtype=torch.long)

    @property
    def num_bytes(self) -> int:
        """Bytes of the summaries of all pages, without spare room."""
        return sum(
            held[:, :, : self.num_pages].numel() * held.element_size()
            for held in self._held.values()
        )

    def cost(self, name: str, num_layers: int) -> float:
        """Returns the bytes that scoring all pages in some layers reads, in tokens of keys and values of a layer."""
        held = self._held.get(name)
        if held is None:
            return 0.0
        return self.num_pages * num_layers * held.shape[3] * held.element_size() / self._token_bytes

    def refresh(self, seq: SequencePages, read_keys: ReadKeys) -> None:
        """Makes the summaries of pages that were sealed since, and forgets those of pages that changed or ended."""
        pages = [p for p in seq.pages if p.sealed and p.tokens[-1] < seq.num_committed]
        stamps = [(page.page_id, page.version) for page in pages]
        known = len(self._stamps)
        if stamps[:known] != self._stamps:
            self._keep(stamps)
            known = len(self._stamps)
        if stamps[:known] != self._stamps:  # a page before known ones: start again
            self._keep([])
            known = 0
        if len(stamps) > known:
            self._add(pages[known:], read_keys)
            self._stamps = stamps
            self._counts += [len(page) for page in pages[known:]]

    def scores(self, name: str, query: torch.Tensor, layer: int | None = None) -> torch.Tensor:
        """Returns scores of a signal, float32: [Y, ..., H, P] for queries [Y, ..., H, D], or of one layer [..., H, P].

        Args:
            name: the signal.
            query: after RoPE.
            layer: place of the layer among those of the book, for queries [..., H, D] of it alone.
        """
        held = self._held[name][:, :, : self.num_pages]
        held = held if layer is None else held[layer : layer + 1]
        query = query.to(held.device)
        signal = self._signals[name]
        if isinstance(
            signal, Sketch
        ):  # [Y, H, D], or of one layer [1, H, D], goes through C where it can
            fast = sketch_scores(signal, query, held)
            if fast is not None:
                return fast
        if layer is None:
            held = held.view(held.shape[0], *[1] * (query.ndim - 3), *held.shape[1:])
        else:
            held = held[0]
        return signal.score(query, held).float()

    def signal(self, name: str) -> KeySignal:
        """Returns a signal of the book."""
        return self._signals[name]

    def clone(self) -> KeyBook:
        """Returns an independent copy, for a fork."""
        twin = copy.copy(self)
        twin._stamps, twin._counts = list(self._stamps), list(self._counts)
        twin._held = {name: held.clone() for name, held in self._held.items()}
        return twin

    def _keep(self, stamps: Sequence[_Stamp]) -> None:
        wanted = set(stamps)
        places = [i for i, stamp in enumerate(self._stamps) if stamp in wanted]
        index = torch.tensor(places, dtype=torch.long)
        self._held = {
            name: held.index_select(2, index.to(held.device)) for name, held in self._held.items()
        }
        self._stamps = [self._stamps[i] for i in places]
        self._counts = [self._counts[i] for i in places]

    def _add(self, pages: Sequence[Page], read_keys: ReadKeys) -> None:
        by_length: dict[int, list[int]] = {}
        for place, page in enumerate(pages):
            by_length.setdefault(len(page), []).append(place)
        for place_of, layer in enumerate(self._layers):
            for places in by_length.values():
                members = [pages[i] for i in places]
                keys = read_keys(layer, members, [page.slots for page in members])
                self._token_bytes = 2 * keys.shape[2] * keys.element_size()
                keys = keys.view(keys.shape[0], len(members), -1, keys.shape[2])  # [K, P, n, D]
                for name, signal in self._signals.items():
                    made = signal.summarise(keys).to(_dtype(signal, keys))
                    room = self._room(name, made, self.num_pages + len(pages))
                    index = torch.tensor(places, device=made.device) + self.num_pages
                    room[place_of].index_copy_(1, index, made)

    def _room(self, name: str, made: torch.Tensor, needed: int) -> torch.Tensor:
        held = self._held.get(name)
        if held is None or held.shape[2] < needed:
            kv_heads, _, width = made.shape
            grown = made.new_zeros(len(self._layers), kv_heads, max(needed, needed * 5 // 4), width)
            if held is not None:
                grown[:, :, : held.shape[2]] = held
            self._held[name] = held = grown
        return held


def _dtype(signal: KeySignal, keys: torch.Tensor) -> torch.dtype:
    # products of bf16 matrices are slow on a CPU (nine times, measured); sketches have a kernel for it
    return (
        torch.float32
        if keys.device.type == "cpu" and not isinstance(signal, Sketch)
        else keys.dtype
    )
