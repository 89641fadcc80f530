"""The frozen values that stages hand to each other. Shapes: B rows, T queries a row, H heads, K KV heads, D head dim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from oval_core.pages import Page, Run

Segment = slice | torch.Tensor
"""Slots read together: a slice of the pool (no copy), or an index tensor (gathered)."""


@dataclass(frozen=True, slots=True)
class ImageSet:
    """Consecutive new tokens of a row that become pages of one image, and of nothing else.

    Attributes:
        first: place of the first of them among the row's new tokens.
        groups: a partition of range(n): places, among these n tokens, of each page's tokens; 1..32 a page.
    """

    first: int
    groups: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Tokens."""
        return sum(map(len, self.groups))


@dataclass(frozen=True, slots=True)
class RowRequest:
    """What one row brings to a forward.

    Attributes:
        num_new: tokens to append; less than T where the row is padded.
        query_places: places of those tokens among the T queries; None when they are all T.
        hidden: bool [tokens cached before] true where this forward must not look; None when nowhere.
        positions: place in the caller's text of each token, new ones included, for windows; None when they
            are consecutive, or in a tree as deep as the tokens before them.
        tree: bool [num_new, num_new] which new tokens each new token sees, itself among them; None when causal.
        images: which of its new tokens are images', in order; the others are text.
        by_position: whether `positions` say what is causal, in place of the order of the tokens: new tokens may lie
            before old ones then, and see only what lies before them.
    """

    num_new: int
    query_places: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    tree: torch.Tensor | None = None
    images: tuple[ImageSet, ...] = ()
    by_position: bool = False


@dataclass(frozen=True, slots=True)
class RowPlan:
    """What one row reads in a forward, from one place: all of its keys, or a part of them.

    Attributes:
        num_new: tokens appended by this forward; they are the last `num_new` of the sequence.
        num_tokens: tokens of the sequence, new ones included.
        length: keys that are read.
        segments: where they are, in key order.
        is_past: whether the keys are all older than the new tokens; else the new ones are the last among them.
        query_places: as in `RowRequest`.
        key_tokens: [length] token index of each key; None when keys are in token order and nothing but that
            order matters (no window, mask or hidden key where tokens are left out).
        positions: [num_tokens] as in `RowRequest`, by token index.
        hidden: bool [length] true where no query may look; None when nowhere.
        pages: (page id, tokens) of the keys, in key order; empty unless somebody watches what pages get.
        page_slots: int64 [2, P] first slot and number of slots of these pages; None where one lies in pieces.
        tree: bool [n, num_new] which new tokens each of the last n of them sees; None when causal. With a tree the new
            tokens are the last keys, in their order, unless all keys are past.
        by_position: as in `RowRequest`.
        ordered: where the same keys are, in token order, where nothing else decides what many queries see; else None.
    """

    num_new: int
    num_tokens: int
    length: int
    segments: tuple[Segment, ...]
    is_past: bool = False
    query_places: torch.Tensor | None = None
    key_tokens: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    pages: tuple[tuple[int, int], ...] = ()
    page_slots: torch.Tensor | None = None
    tree: torch.Tensor | None = None
    by_position: bool = False
    ordered: tuple[Segment, ...] | None = None

    def in_order(self) -> RowPlan:
        """Returns the same plan with its keys in token order if `ordered` says where, else itself.

        Gathering the keys once is far cheaper than a mask over all of them.
        """
        if self.ordered is None:
            return self
        return replace(self, segments=self.ordered, key_tokens=None, ordered=None)

    @property
    def has_plain_past(self) -> bool:
        """Whether every query may see all keys that are older than the new tokens, but for a window."""
        return self.key_tokens is None and self.positions is None and self.hidden is None

    @property
    def is_plain(self) -> bool:
        """Whether causal order alone decides what a query sees."""
        return self.has_plain_past and (self.tree is None or self.is_past)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward of a batch, made once and read by every layer.

    Attributes:
        num_queries: T, padding included.
        rows: one plan a row.
        write_run: slots of all new tokens, when they are one run of one unpadded row; else None.
        slot_mapping: [N] slots of all new tokens, row after row; None with `write_run`.
        source: [N] place of each in the flattened [B * T] input; None when they are all of it.
        stride: (first slot, slots between rows), when all rows are equally long runs at equal distances.
        bias: additive mask [B or 1, H or 1, T, length] given by the caller for this forward; None for causal.
    """

    num_queries: int
    rows: tuple[RowPlan, ...]
    write_run: slice | None = None
    slot_mapping: torch.Tensor | None = None
    source: torch.Tensor | None = None
    stride: tuple[int, int] | None = None
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """How one layer attends.

    Attributes:
        scaling: factor on q.k.
        window: a query sees itself and the `window - 1` places before it; None for all.
        softcap: scores become softcap * tanh(score / softcap); None for none.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class RowPages:
    """Where the keys that a row reads lie in one pool.

    Attributes:
        runs: their slots.
        key_tokens: token index of each, as in `RowPlan`.
        new_slots: slots of the row's new tokens, in token order.
        num_tokens: tokens of the sequence, new ones included.
        pages: as in `RowPlan`.
        page_starts: first slot of each of them; empty where one lies in pieces.
    """

    runs: Sequence[Run]
    key_tokens: Sequence[int] | None
    new_slots: Sequence[int]
    num_tokens: int
    pages: tuple[tuple[int, int], ...] = ()
    page_starts: tuple[int, ...] = ()


RowPagesChosen = tuple[Page, ...] | None
"""The pages that a row reads, in the order of the sequence; None for all of them."""


@dataclass(frozen=True, slots=True)
class PageSelection:
    """What a policy chose for one forward. Without groups, every layer reads everything.

    Attributes:
        groups: selections, each with the pages of every row.
        group_of: by layer, which of them it reads; a layer that is not named reads everything.
        scores: by page id, how much a page is wanted later: where memory is short, low ones leave it first.
        is_watched: whether the policy looks at what the pages get.
    """

    groups: tuple[tuple[RowPagesChosen, ...], ...] = ()
    group_of: Mapping[int, int] = field(default_factory=dict)
    scores: Mapping[int, float] = field(default_factory=dict)
    is_watched: bool = False
