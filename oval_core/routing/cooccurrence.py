"""Which pages are selected together: a sliding window of pairs, and the graph that is counted from it now and then.

Knows page ids only; selects nothing. Shapes: P pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy as shallow_copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from oval_core.config import check_int
from oval_core.errors import ConfigError

DEFAULT_WINDOW_PAIRS = 2**18
"""128 steps of 64 selected pages, so that each of the 100 steps between two rebuilds is counted at least once.

The article's 128 pairs are 21 steps of its 4 pages; of 64 pages they are a sixteenth of one step."""

DEFAULT_REBUILD_EVERY = 100

_SHIFT = 32
_ID_LIMIT = 2**31  # two ids make one int64 key: smaller id << 32 | larger id

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _PairCounts:
    """Distinct pairs as rising keys, and how often each occurs. The arrays are never changed."""

    keys: _Ints
    counts: _Ints

    @classmethod
    def of(cls, keys: _Ints) -> _PairCounts:
        return cls(*np.unique(keys, return_counts=True))

    def where(self, kept: npt.NDArray[np.bool_]) -> _PairCounts:
        return _PairCounts(self.keys[kept], self.counts[kept])


GRAPH_PAGES = 8
"""Pages of a step, by mass, that count as read together: the graph is about what matters, not about the whole budget."""


class CooccurrenceGraph:
    """How often two pages were selected in the same step, over the newest pairs. One graph serves all layer groups.

    Nothing reads the counts between two rebuilds, so a step only stores its pairs and a rebuild counts the window at
    once. That takes a third of the time of adding and subtracting each pair as it comes and goes.

    Memory: at most 72 bytes a pair of the window (19 MB by default) and 20 bytes a page, whatever the number of steps
    and selected pages. After `all_reduce`, 56 of the 72 for every distinct pair of all ranks.
    """

    _adjacency: tuple[_Ints, torch.Tensor] | None

    def __init__(
        self,
        window_pairs: int = DEFAULT_WINDOW_PAIRS,
        rebuild_every: int = DEFAULT_REBUILD_EVERY,
    ) -> None:
        """Makes an empty graph.

        Args:
            window_pairs: pairs that count, the newest ones.
            rebuild_every: steps from one rebuild to the next.
        """
        check_int("window_pairs", window_pairs, 1, None)
        check_int("rebuild_every", rebuild_every, 1, None)
        self.window_pairs = window_pairs
        self.rebuild_every = rebuild_every
        self._most = math.isqrt(2 * window_pairs) + 2  # more pages of one selection cannot matter
        self.reset()

    def reset(self) -> None:
        """Forgets everything, as if newly made."""
        # [ dropped pairs | window, oldest first | room ]; moved to the left, or made larger, when the room is used up
        self._buffer = np.empty(0, np.int64)
        self._end = 0
        self._held = 0
        self._steps = 0
        self._largest = -1
        self._is_shared = False
        self._set_graph(_PairCounts.of(np.empty(0, np.int64)))

    def copy(self) -> CooccurrenceGraph:
        """Returns an equal graph that goes its own way from here."""
        twin = shallow_copy(self)
        # no room of its own: the next pair makes it another buffer, and nothing is written left of the room
        twin._buffer = self._window
        twin._end = self._held
        return twin

    def observe(self, *selections: Sequence[int]) -> bool:
        """Takes in the pages of one step. Returns whether the graph was rebuilt: the moment for `all_reduce`.

        After `all_reduce` the graph is not rebuilt here, so that ranks never differ; the result says it would be.

        Args:
            selections: page ids read together, best first; one selection a layer group. Pages of different selections
                make no pair; a pair that several selections have counts for each of them. Where one selection has
                more pairs than the window, those among its first pages remain.
        """
        for selection in selections:
            self._push(_pair_keys(_page_ids(selection), self._most))
        self._steps += 1
        if self._steps < self.rebuild_every:
            return False
        if self._is_shared:
            self._steps = 0
        else:
            self.rebuild()
        return True

    def rebuild(self) -> None:
        """Counts the window of this rank now; the next rebuild is `rebuild_every` steps from here."""
        self._steps = 0
        self._set_graph(_PairCounts.of(self._window))

    def forget(self, page_ids: Iterable[int]) -> None:
        """Drops all pairs of pages that ended, from the window and from the graph. Older pairs do not come back."""
        gone = _page_ids(list(page_ids))
        if not gone.size or gone.min() > self._largest:
            return

        def remain(keys: _Ints) -> npt.NDArray[np.bool_]:
            first, second = _ids_of(keys)
            return ~(np.isin(first, gone) | np.isin(second, gone))

        self._buffer = self._window[remain(self._window)]
        self._end = self._held = len(self._buffer)
        self._set_graph(self._graph.where(remain(self._graph.keys)))

    def counts(self) -> dict[tuple[int, int], int]:
        """Returns the weight of every pair (smaller id first) as of the last rebuild."""
        first, second = _ids_of(self._graph.keys)
        pairs = zip(first.tolist(), second.tolist(), strict=True)
        return dict(zip(pairs, self._graph.counts.tolist(), strict=True))

    @property
    def density(self) -> float:
        """Share of non-zero entries of A among the pages that have a pair, self loops left out; .05-.15 is healthy."""
        pages = len(np.unique(np.concatenate(_ids_of(self._graph.keys))))
        return 2 * len(self._graph.keys) / pages**2 if pages else 0.0

    def adjacency(self, page_ids: Sequence[int]) -> torch.Tensor:
        """Returns D^-1/2 (A + I) D^-1/2 of these pages, sparse [P, P], float32, on the CPU.

        A has the counts as of the last rebuild, D the row sums of A + I; pages that are not named here have no part.
        A page that came later has its self loop only. The tensor is kept and given again while nothing changes: do not
        write to it.

        Args:
            page_ids: P distinct pages; rows and columns follow their order.
        """
        wanted = _page_ids(page_ids)
        if self._adjacency is not None and np.array_equal(self._adjacency[0], wanted):
            return self._adjacency[1]
        if len(np.unique(wanted)) != len(wanted):
            raise ConfigError(
                f"page_ids: got {len(wanted)} pages of which only {len(np.unique(wanted))} differ. "
                "Allowed: distinct pages. Name each page once."
            )
        with torch.inference_mode(False):  # it is kept, and a later use may train
            matrix = self._with_newer_pages(wanted)
            if matrix is None:
                matrix = _normalised(self._graph, wanted)
        self._adjacency = (wanted, matrix)
        return matrix

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """Sums the counts of the windows of all ranks, as they are now; afterwards all ranks hold the same graph.

        Without other ranks nothing happens. From then on the graph changes only here, by `rebuild` and by `forget`;
        each rank goes on observing for itself, and a later call sums the windows anew. All ranks must call it, and
        page ids must mean the same on all of them (tensor parallel: they do).
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) < 2:
            return
        self._is_shared = True
        self._steps = 0
        self._set_graph(_sum_over_ranks(_PairCounts.of(self._window), group))

    @property
    def _window(self) -> _Ints:
        return self._buffer[self._end - self._held : self._end]

    def _with_newer_pages(self, wanted: _Ints) -> torch.Tensor | None:
        """Returns the kept matrix plus self loops, where that is all that pages at the end of the text add."""
        if self._adjacency is None:
            return None
        before, matrix = self._adjacency
        old, size = len(before), len(wanted)
        seconds = _ids_of(self._graph.keys)[1]
        last_known = int(seconds.max()) if seconds.size else -1
        if (
            size < old
            or not np.array_equal(wanted[:old], before)
            or wanted[old:].min() <= last_known
        ):
            return None
        loops = torch.arange(old, size).expand(2, -1)
        return _sparse(
            torch.cat((matrix.indices(), loops), 1),
            torch.cat((matrix.values(), torch.ones(size - old))),
            size,
        )

    def _push(self, pairs: _Ints) -> None:
        pairs = pairs[-self.window_pairs :]
        if self._end + len(pairs) > len(self._buffer):
            # of at most twice the window, so that a pair is moved once on average
            kept = self._window[max(self._held + len(pairs) - self.window_pairs, 0) :]
            self._end = self._held = len(kept)
            self._buffer = np.empty(2 * (self._held + len(pairs)), np.int64)
            self._buffer[: self._end] = kept
        self._buffer[self._end : self._end + len(pairs)] = pairs
        self._end += len(pairs)
        self._held = min(self._held + len(pairs), self.window_pairs)
        self._note_largest(pairs)

    def _note_largest(self, pairs: _Ints) -> None:
        if pairs.size:
            self._largest = max(self._largest, int(_ids_of(pairs)[1].max()))

    def _set_graph(self, graph: _PairCounts) -> None:
        self._graph = graph
        self._note_largest(graph.keys)
        self._adjacency = None


def heaviest(mass: torch.Tensor) -> list[int]:
    """Returns the pages that count as read together in a step of this mass [G, P], heaviest first."""
    best = mass.amax(0).topk(min(GRAPH_PAGES, mass.shape[-1]))
    pages: list[int] = best.indices[best.values > 0].tolist()
    return pages


def _page_ids(page_ids: Sequence[int]) -> _Ints:
    """Checks ids at the door and returns them as an array."""
    try:
        ids = np.asarray(page_ids)
    except ValueError:  # rows of different lengths
        ids = np.empty((1, 1))
    if ids.size == 0:
        return np.empty(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= _ID_LIMIT:
        raise ConfigError(
            f"page_ids: got {page_ids!r:.80}. Allowed: a flat list of whole numbers 0..{_ID_LIMIT - 1}. "
            "Give page ids."
        )
    return ids.astype(np.int64)


def _pair_keys(ids: _Ints, most: int) -> _Ints:
    """Returns the pairs of a selection; those among its first pages come last."""
    distinct, first_seen = np.unique(ids, return_index=True)
    if len(distinct) < len(ids):
        ids = ids[np.sort(first_seen)]
    ids = ids[:most]
    later, earlier = np.tril_indices(len(ids), -1)
    low, high = np.minimum(ids[later], ids[earlier]), np.maximum(ids[later], ids[earlier])
    keys: _Ints = (low << _SHIFT | high)[::-1]
    return keys


def _ids_of(keys: _Ints) -> tuple[_Ints, _Ints]:
    return keys >> _SHIFT, keys & (2**_SHIFT - 1)


def _normalised(graph: _PairCounts, wanted: _Ints) -> torch.Tensor:
    size = len(wanted)
    order = np.argsort(wanted)

    def places(ids: _Ints) -> _Ints:
        """Rows of these ids; -1 where an id is not wanted."""
        if not size:
            return np.full(len(ids), -1)
        place = order[np.searchsorted(wanted, ids, sorter=order).clip(max=size - 1)]
        return np.where(wanted[place] == ids, place, -1)

    first, second = (places(ids) for ids in _ids_of(graph.keys))
    both = (first >= 0) & (second >= 0)
    first, second, weight = first[both], second[both], graph.counts[both]
    loops = np.arange(size)
    rows = np.concatenate((first, second, loops))
    columns = np.concatenate((second, first, loops))
    weights = np.concatenate((weight, weight, np.ones(size, np.int64)))
    rising = np.argsort(rows * size + columns, kind="stable")  # the upper half is in order
    rows, columns, weights = rows[rising], columns[rising], weights[rising]
    scale = np.bincount(rows, weights, minlength=size) ** -0.5
    values = torch.from_numpy(weights * scale[rows] * scale[columns]).float()
    return _sparse(torch.from_numpy(np.stack((rows, columns))), values, size)


def _sparse(indices: torch.Tensor, values: torch.Tensor, size: int) -> torch.Tensor:
    # sorted and distinct by construction: a check would cost as much as all the rest
    return torch.sparse_coo_tensor(
        indices, values, (size, size), is_coalesced=True, check_invariants=False
    )


def _sum_over_ranks(own: _PairCounts, group: dist.ProcessGroup | None) -> _PairCounts:
    """Returns the sum of the counts of all ranks: they exchange lengths, then pairs padded to the longest."""
    device = torch.device("cpu")
    if dist.get_backend(group) == dist.Backend.NCCL:
        device = torch.device("cuda", torch.cuda.current_device())
    world = dist.get_world_size(group)
    length = torch.tensor([len(own.keys)], device=device)
    lengths = [torch.empty_like(length) for _ in range(world)]
    dist.all_gather(lengths, length, group=group)
    longest = int(torch.cat(lengths).max())
    padded = torch.zeros(2, longest, dtype=torch.int64, device=device)
    padded[:, : len(own.keys)] = torch.from_numpy(np.stack((own.keys, own.counts)))
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded, group=group)
    keys, counts = torch.cat(parts, dim=1).cpu().numpy()
    real = counts > 0
    distinct, which = np.unique(keys[real], return_inverse=True)
    totals = np.bincount(which, counts[real], minlength=len(distinct))
    return _PairCounts(distinct, totals.astype(np.int64))
