"""A cache with a policy that selects, driven beside a slow oracle of what it reads, what pages get and what it remembers.

Every token has an id, and tables give its K, V, query and hidden state: a row is a list of ids, so any change of the text
is a change of a list. Shapes: B rows, T queries, N new tokens, L keys, H query heads, K KV heads, P pages, G groups.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from oval_core.attention import create_backend
from oval_core.config import OvalConfig
from oval_core.paged_cache import PagedCache
from oval_core.pages import Page, SequencePages
from oval_core.routing.chosen import Chosen
from oval_core.routing.registry import create_policy
from oval_core.routing.routed import RoutedPolicy
from oval_core.values import LayerSpec, RowRequest

CPU = torch.device("cpu")
_NUM_IDS = 1200
_FACTORS = {"fast": 0.7, "slow": 0.97, "peak": 0.7}
FIELDS = ("last", "fast", "slow", "total", "steps", "peak", "chosen", "age")


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """Shapes are equal, and numbers nearly; a fraction of the time of `assert_close`."""
    assert got.shape == want.shape
    got, want = got.double(), want.double()
    if not bool(((got - want).abs() <= tolerance * (1 + want.abs())).all()):
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@dataclass(frozen=True)
class Shape:
    """The imagined model; `windows` and `softcap` as `LayerSpec` has them."""

    windows: tuple[int | None, ...] = (None, None, None, None)
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 8
    hidden_size: int = 6
    softcap: float | None = None
    dtype: torch.dtype = torch.float32

    @property
    def tolerance(self) -> float:
        return 2e-5 if self.dtype == torch.float32 else 3e-2


@dataclass
class SlowHistory:
    """What a row's pages got, page by page and group by group, in plain numbers."""

    num_groups: int
    pages: dict[int, list[dict[str, float]]] = field(default_factory=dict)
    waiting: tuple[int, list[int], torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def settle(self, seq: SequencePages) -> None:
        ids = [page.page_id for page in seq.pages if page.tokens[0] < seq.num_committed]
        unread = [dict.fromkeys(FIELDS, 0.0) for _ in range(self.num_groups)]
        self.pages = {i: self.pages.get(i, copy.deepcopy(unread)) for i in ids}
        if self.waiting is None:
            return
        first, seen, *measured = self.waiting
        mass, peak, read = (values.tolist() for values in measured)
        self.waiting = None
        for step in range(min(seq.num_committed - first, len(mass))):
            for page_id, groups in self.pages.items():
                at = seen.index(page_id) if page_id in seen else None
                for group, old in enumerate(groups):
                    if at is not None and read[group][at]:
                        _observe(old, mass[step][group][at], peak[step][group][at])
                    else:
                        old["chosen"] *= 0.9
                        old["age"] += 1

    def table(self, name: str) -> torch.Tensor:
        """Returns [G, P] of one field, float64."""
        rows = [[group[name] for group in groups] for groups in self.pages.values()]
        return torch.tensor(rows, dtype=torch.float64).T


def _observe(old: dict[str, float], mass: float, peak: float) -> None:
    for name, new in (("fast", mass), ("slow", mass), ("peak", peak)):
        factor = _FACTORS[name] if old["steps"] else 0.0
        old[name] = factor * old[name] + (1 - factor) * new
    old["last"], old["age"] = mass, 0
    old["total"] += mass
    old["steps"] += 1
    old["chosen"] = 0.9 * old["chosen"] + 0.1


class RoutedWorld:
    """One cache and, by row, the ids of its tokens."""

    def __init__(self, shape: Shape | None = None, seed: int = 0, **settings: object) -> None:
        self.shape = s = shape or Shape()
        settings = {"page_size": 4, "policy": "routed", **settings}
        config = OvalConfig(**settings)
        policy, backend = create_policy(config, s.windows), create_backend(config.backend)
        self.cache = PagedCache(config, s.windows, policy, backend)
        self.rows: list[list[int]] = []
        self.histories: list[SlowHistory] = []
        self.next_id = 0
        self.outputs: list[torch.Tensor] = []
        self.streamed_on_demand = 0  # pages that were asked for only by `missed`, and were away
        self.last_read: dict[int, list[int]] = {}  # by layer: tokens that the last row read
        self.most_away = 0  # pages in a slow tier only
        self.reads: list[tuple[int, int, int, int]] = []  # (layer, row, tokens read, tokens)
        made = torch.Generator().manual_seed(seed)

        def table(*size: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*size, generator=made) * scale).to(s.dtype)

        layers = len(s.windows)
        self.keys = table(layers, s.num_kv_heads, _NUM_IDS, s.head_dim)
        self.values = table(layers, s.num_kv_heads, _NUM_IDS, s.value_dim)
        self.queries = table(layers, s.num_heads, _NUM_IDS, s.head_dim, scale=2.0)
        self.states = table(_NUM_IDS, s.hidden_size)

    @property
    def policy(self) -> RoutedPolicy:
        assert isinstance(self.cache.policy, RoutedPolicy)
        return self.cache.policy

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.rows]

    def spec(self, layer: int) -> LayerSpec:
        s = self.shape
        return LayerSpec(s.head_dim**-0.5, s.windows[layer], s.softcap)

    def new_ids(self, count: int) -> list[int]:
        self.next_id += count
        return [i % _NUM_IDS for i in range(self.next_id - count, self.next_id)]

    def forward(
        self,
        counts: Sequence[int],
        commit: bool = True,
        hidden: Sequence[torch.Tensor | None] | None = None,
        bias: torch.Tensor | None = None,
        ids: Sequence[Sequence[int]] | None = None,
        num_layers: int | None = None,
        queries: int | None = None,
    ) -> None:
        """One forward with every check; padded on the left. Stops after `num_layers` without an end where given."""
        new = [list(i) for i in ids] if ids else [self.new_ids(count) for count in counts]
        before = self.rows or [[] for _ in counts]
        texts = [old + own for old, own in zip(before, new, strict=True)]
        width = queries or max(counts)
        places = [None if n == width else torch.arange(width - n, width) for n in counts]
        masks = hidden or [None] * len(counts)
        requests = [RowRequest(*r) for r in zip(counts, places, masks, strict=True)]
        self.cache.begin(requests, width, CPU, bias=bias)
        self._check_start(counts)
        measured: dict[int, list[tuple[int, list[int], torch.Tensor]]] = {}
        self.outputs = []
        for layer in range(len(self.shape.windows))[:num_layers]:
            self._layer(layer, texts, counts, width, masks, bias, measured)
        if num_layers is not None:
            return
        if not commit:
            self.cache.abort()
            return
        self.cache.commit(self._columns(self.states[None, None], texts, counts, width)[:, 0])
        self.rows = texts
        self._note(measured, counts)
        self.check_books()

    def truncate(self, lengths: Sequence[int]) -> None:
        self.cache.truncate(lengths)
        self.rows = [row[:length] for row, length in zip(self.rows, lengths, strict=True)]

    def reorder(self, rows: Sequence[int]) -> None:
        tails = [seq.tail for seq in self.cache.table.sequences]
        old = [None if tail is None else tail.page_id for tail in tails]
        self.cache.reorder(rows)
        self.rows = [list(self.rows[row]) for row in rows]
        self.histories = [copy.deepcopy(self.histories[row]) for row in rows]
        for row, came_from in enumerate(rows):  # the open page of a fork is another page
            tail = self.cache.table.sequences[row].tail
            if tail is not None and tail.page_id != old[came_from]:
                self.histories[row].pages.pop(old[came_from], None)

    def reset(self) -> None:
        self.cache.reset()
        self.rows, self.histories = [], []

    def clone(self) -> RoutedWorld:
        twin = copy.copy(self)
        twin.cache = self.cache.clone()
        twin.rows = [list(row) for row in self.rows]
        twin.histories = copy.deepcopy(self.histories)
        twin.outputs, twin.reads = [], []
        return twin

    def check(self) -> None:
        """K and V bit for bit, and the integrity of table and tiers."""
        self.cache.table.check_integrity()
        if self.cache.tiers is not None:
            self.cache.tiers.check_integrity()
            self.most_away = max(self.most_away, self.cache.tiers.num_away)
        for row, text in enumerate(self.rows):
            for layer in range(len(self.shape.windows)):
                keys, values = self.cache.gather(layer, row)
                assert torch.equal(keys, self.keys[layer][:, text])
                assert torch.equal(values, self.values[layer][:, text])

    def check_books(self) -> None:
        """Summaries equal those made anew of the keys that the text has now."""
        for row, memory in enumerate(self.policy._rows):
            seq, book = self.cache.table.sequences[row], memory.book
            if book is None:
                continue
            pages = [p for p in seq.pages if p.sealed and p.tokens[-1] < seq.num_committed]
            assert book.page_ids == [page.page_id for page in pages]
            assert book.counts.tolist() == [len(page) for page in pages]
            if not pages:
                continue
            for name, held in book._held.items():
                keys = self.keys[self.policy._layers][:, :, self.rows[row]]
                made = [book.signal(name).summarise(keys[:, :, page.tokens]) for page in pages]
                close(held[:, :, : len(pages)], torch.stack(made, 2), self.shape.tolerance)

    def chosen(self, row: int) -> Chosen | None:
        """What the running forward reads of a row; None for everything."""
        return self.policy._chosen[row]

    def _check_start(self, counts: Sequence[int]) -> None:
        groups = self.policy.num_groups
        while len(self.histories) < len(counts):
            self.histories.append(SlowHistory(groups))
        for row, seq in enumerate(self.cache.table.sequences):
            if counts[row]:  # the policy is not asked about a row that brings nothing
                self.histories[row].settle(seq)
                memory = self.policy._rows[row]
                assert memory._page_ids == list(self.histories[row].pages)
                for name in FIELDS if memory._page_ids else ():
                    got, want = getattr(memory.history, name), self.histories[row].table(name)
                    close(got, want, 10 * self.shape.tolerance)

    def _columns(
        self, table: torch.Tensor, texts: list[list[int]], counts: Sequence[int], width: int
    ) -> torch.Tensor:
        """Returns [B, heads, T, D] of a table [1 or heads, ..., ids, D] for the new tokens; padding is noise."""
        table = table.reshape(-1, *table.shape[-2:])
        out = torch.randn(len(texts), table.shape[0], width, table.shape[-1]).to(table.dtype)
        for row, count in enumerate(counts):
            if count:
                out[row, :, width - count :] = table[:, texts[row][-count:]]
        return out

    def _layer(
        self,
        layer: int,
        texts: list[list[int]],
        counts: Sequence[int],
        width: int,
        masks: Sequence[torch.Tensor | None],
        bias: torch.Tensor | None,
        measured: dict[int, list[tuple[int, list[int], torch.Tensor]]],
    ) -> None:
        given = [self._columns(t[layer], texts, counts, width) for t in (self.keys, self.values)]
        query = self._columns(self.queries[layer], texts, counts, width)
        self.cache.write(layer, *given)
        out = self.cache.attend(layer, query, self.spec(layer))
        self.outputs.append(out)
        for row, count in enumerate(counts):
            if not count:
                assert not out[row].any()
                continue
            assert not out[row, : width - count].any()
            pages = self._pages_read(layer, row)
            if self.policy.watches(layer):
                self._check_reads(layer, row, pages)
                self._count_repairs(layer, row, pages)
            own = None if bias is None else bias[row if len(bias) > 1 else 0]
            want, weights = self._attention(layer, texts[row], count, pages, masks[row], own)
            tolerance = self.shape.tolerance
            close(out[row, width - count :].transpose(0, 1), want, tolerance)
            if self.policy.watches(layer):
                weights = weights[:, -64:]
                by_page = [weights[..., page.tokens].sum(-1) for page in pages]
                seen = self.policy._watch.seen(row)
                ids = [page.page_id for page in pages]
                order = [seen.page_ids.index(page_id) for page_id in ids]
                share = seen.lse.softmax(-1).nan_to_num(0.0)[..., order]
                close(share, torch.stack(by_page, -1), tolerance)
                record = (self.policy.group_of[layer], ids, torch.stack(by_page, -1))
                measured.setdefault(row, []).append(record)

    def _pages_read(self, layer: int, row: int) -> list[Page]:
        seq = self.cache.table.sequences[row]
        if not self.policy.watches(layer):
            return seq.pages
        read = self.policy._watch.seen(row).page_ids
        assert len(read) == len(set(read)), "a page was read twice"
        assert set(read) <= {page.page_id for page in seq.pages}
        return [page for page in seq.pages if page.page_id in read]

    def _attention(
        self,
        layer: int,
        text: list[int],
        count: int,
        pages: Sequence[Page],
        hidden: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns [H, N, E] and weights [H, N, L] over these pages, float64, by the textbook."""
        spec, group = self.spec(layer), self.shape.num_heads // self.shape.num_kv_heads
        query = self.queries[layer][:, text[-count:]].double()
        keys = self.keys[layer][:, text].double().repeat_interleave(group, 0)
        values = self.values[layer][:, text].double().repeat_interleave(group, 0)
        scores = query @ keys.mT * spec.scaling
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        length = len(text)
        last = torch.arange(length - count, length)[:, None]
        seen = torch.arange(length) <= last
        if spec.window is not None:
            seen &= torch.arange(length) > last - spec.window
        if hidden is not None:
            seen[:, : length - count] &= ~hidden
        if bias is not None:
            seen, scores = torch.ones_like(seen), scores + bias.double()[:, -count:]
        read = torch.zeros(length, dtype=torch.bool)
        for page in pages:
            read[page.tokens] = True
        weights = scores.masked_fill(~(seen & read), float("-inf")).softmax(-1).nan_to_num(0.0)
        return weights @ values, weights

    def _check_reads(self, layer: int, row: int, pages: Sequence[Page]) -> None:
        policy, config = self.policy, self.policy._config
        seq, chosen = self.cache.table.sequences[row], self.chosen(row)
        read = {page.page_id for page in pages}
        count = sum(len(page) for page in pages)
        self.reads.append((layer, row, count, seq.length))
        self.last_read[layer] = [token for page in pages for token in page.tokens]
        if chosen is None:
            assert count == seq.length
            return
        recent = seq.num_committed - config.window_size
        must = [
            p
            for p in seq.pages
            if min(p.tokens) < config.num_sink_tokens or max(p.tokens) >= recent
        ]
        assert {page.page_id for page in must} <= read
        wanted = {
            p.page_id
            for p, own in zip(seq.pages, chosen.mask[policy.group_of[layer]], strict=True)
            if own
        }
        assert wanted <= read
        if policy.name == "guarded":
            return
        budget = config.budget(seq.length)
        assert count <= max(budget, sum(len(page) for page in must)), "more than the budget"
        left = [len(page) for page in seq.pages if page.page_id not in read]
        if config.lead == 1 and left:
            assert count + min(left) > budget, "another page would have fitted"

    def _count_repairs(self, layer: int, row: int, pages: Sequence[Page]) -> None:
        chosen, tiers = self.chosen(row), self.cache.tiers
        if chosen is None or tiers is None or layer not in tiers.layers:
            return
        mask = chosen.mask[self.policy.group_of[layer]].tolist()
        ahead = {page.page_id for page, own in zip(chosen.pages, mask, strict=True) if own}
        late = [page.page_id for page in pages if page.page_id not in ahead]
        self.streamed_on_demand += sum(i not in tiers.residency for i in late)

    def _note(
        self, measured: dict[int, list[tuple[int, list[int], torch.Tensor]]], counts: Sequence[int]
    ) -> None:
        for row, layers in measured.items():
            ids = sorted({i for _, own, _ in layers for i in own})
            num = min(counts[row], 64)
            shape = (num, self.policy.num_groups, len(ids))
            mass, peak = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
            read = torch.zeros(shape[1:])
            for group, own, weights in layers:
                for i, page_id in enumerate(own):
                    at = ids.index(page_id)
                    mass[:, group, at] += weights[..., i].mean(0)
                    peak[:, group, at] = peak[:, group, at].maximum(weights[..., i].amax(0))
                    read[group, at] += 1
            mass /= read.clamp(min=1)
            self.histories[row].waiting = (len(self.rows[row]) - num, ids, mass, peak, read > 0)
