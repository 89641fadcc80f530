"""A `PagedCache` beside the same K and V kept as plain tensors a row. Shapes as in `reference.py`; B rows, T queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from reference import reference_attention

from oval_core.attention import create_backend
from oval_core.config import OvalConfig
from oval_core.paged_cache import PagedCache
from oval_core.routing.registry import create_policy
from oval_core.values import LayerSpec, RowRequest

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Facts:
    """Shape of the imagined model."""

    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 8
    hidden_size: int = 6
    dtype: torch.dtype = torch.float32


def new_cache(facts: Facts, has_windows: bool = False, **settings: object) -> PagedCache:
    config = OvalConfig(**settings)
    windows = [1 << 30 if has_windows else None] * facts.num_layers
    policy, backend = create_policy(config, windows), create_backend(config.backend)
    return PagedCache(config, windows, policy, backend)


class DenseTwin:
    """Drives both and compares them: K and V bit for bit, attention to 1e-5."""

    def __init__(
        self,
        facts: Facts | None = None,
        has_windows: bool = False,
        compares_attention: bool = True,
        **settings: object,
    ) -> None:
        self.facts = facts or Facts()
        self.compares_attention = compares_attention
        self.cache = new_cache(self.facts, has_windows, **settings)
        self.keys: list[list[torch.Tensor]] = []  # [row][layer] -> [K, L, D]
        self.values: list[list[torch.Tensor]] = []
        self.hidden: list[torch.Tensor] = []  # [row] -> [L, C]

    @property
    def lengths(self) -> list[int]:
        return [row[0].shape[1] for row in self.keys]

    def begin(
        self,
        counts: Sequence[int],
        num_queries: int | None = None,
        reserve: int = 0,
        hidden_keys: Sequence[torch.Tensor | None] | None = None,
        places: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor | None]:
        """Begins a forward of counts[row] new tokens; padding is on the left. Returns the places."""
        queries = num_queries or max(counts)
        found: list[torch.Tensor | None] = []
        for row, count in enumerate(counts):
            padded = torch.arange(queries - count, queries)
            found.append(places[row] if places else None if count == queries else padded)
        masks = hidden_keys or [None] * len(counts)
        requests = [RowRequest(*row) for row in zip(counts, found, masks, strict=True)]
        self.cache.begin(requests, queries, CPU, reserve)
        return found

    def random_kv(self, batch: int, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        f = self.facts
        keys = torch.randn(batch, f.num_kv_heads, queries, f.head_dim).to(f.dtype)
        return keys, torch.randn(batch, f.num_kv_heads, queries, f.value_dim).to(f.dtype)

    def forward(
        self,
        counts: Sequence[int],
        num_queries: int | None = None,
        reserve: int = 0,
        hidden_keys: Sequence[torch.Tensor | None] | None = None,
        places: Sequence[torch.Tensor] | None = None,
        window: int | None = None,
        commit: bool = True,
    ) -> None:
        """One whole forward, attention compared on every layer unless told not to; committed or aborted."""
        f, queries = self.facts, num_queries or max(counts)
        found = self.begin(counts, queries, reserve, hidden_keys, places)
        spec = LayerSpec(scaling=f.head_dim**-0.5, window=window)
        old = self.keys, self.values, self.hidden
        rows = range(len(counts))
        if not self.keys:
            self.keys, self.values = [[] for _ in rows], [[] for _ in rows]
            self.hidden = [torch.zeros(0, f.hidden_size, dtype=f.dtype) for _ in rows]
        new_keys: list[list[torch.Tensor]] = [[] for _ in rows]
        new_values: list[list[torch.Tensor]] = [[] for _ in rows]
        for layer in range(f.num_layers):
            keys, values = self.random_kv(len(counts), queries)
            query = torch.randn(len(counts), f.num_heads, queries, f.head_dim).to(f.dtype)
            self.cache.write(layer, keys, values)
            if self.compares_attention:
                out = self.cache.attend(layer, query, spec)
                assert out.shape == (len(counts), queries, f.num_heads, f.value_dim)
            for row, count in enumerate(counts):
                at = slice(None) if found[row] is None else found[row]
                fresh_k, fresh_v = keys[row][:, at], values[row][:, at]
                past = bool(self.keys[row])
                all_k = torch.cat([self.keys[row][layer], fresh_k], 1) if past else fresh_k
                all_v = torch.cat([self.values[row][layer], fresh_v], 1) if past else fresh_v
                new_keys[row].append(all_k)
                new_values[row].append(all_v)
                if self.compares_attention:
                    mask = self.unseen(layer, row, hidden_keys[row] if hidden_keys else None, count)
                    self._compare(out[row], query[row], all_k, all_v, at, count, spec, mask)
        states = torch.randn(len(counts), queries, f.hidden_size).to(f.dtype)
        if not commit:
            self.keys, self.values, self.hidden = old
            self.cache.abort()
            return
        self.cache.commit(states)
        self.keys, self.values = new_keys, new_values
        for row in rows:
            at = slice(None) if found[row] is None else found[row]
            self.hidden[row] = torch.cat([self.hidden[row], states[row][at]])

    def unseen(
        self, layer: int, row: int, hidden: torch.Tensor | None, count: int
    ) -> torch.Tensor | None:
        """Which tokens of a row no query of the running forward may see, bool [L], new ones included; None for none."""
        return None if hidden is None else torch.cat([hidden, hidden.new_zeros(count)])

    def truncate(self, lengths: Sequence[int]) -> None:
        self.cache.truncate(lengths)
        for row, length in enumerate(lengths):
            self.keys[row] = [keys[:, :length] for keys in self.keys[row]]
            self.values[row] = [values[:, :length] for values in self.values[row]]
            self.hidden[row] = self.hidden[row][:length]

    def reorder(self, rows: Sequence[int]) -> None:
        self.cache.reorder(rows)
        self.keys = [list(self.keys[row]) for row in rows]
        self.values = [list(self.values[row]) for row in rows]
        self.hidden = [self.hidden[row] for row in rows]

    def reset(self) -> None:
        self.cache.reset()
        self.keys, self.values, self.hidden = [], [], []

    def check(self, cache: PagedCache | None = None) -> None:
        """K and V of every row and layer are equal, bit for bit."""
        cache = cache or self.cache
        cache.table.check_integrity()
        assert cache.batch_size == len(self.keys)
        for row in range(len(self.keys)):
            for layer in range(self.facts.num_layers):
                keys, values = cache.gather(layer, row)
                assert torch.equal(keys, self.keys[row][layer])
                assert torch.equal(values, self.values[row][layer])

    @staticmethod
    def _compare(
        out: torch.Tensor,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        at: slice | torch.Tensor,
        count: int,
        spec: LayerSpec,
        mask: torch.Tensor | None,
    ) -> None:
        want = torch.zeros(out.shape, dtype=torch.float64)
        if count:
            asked = query[:, at]
            got = reference_attention(asked, keys, values, spec.scaling, spec.window, hidden=mask)
            want[at] = got.transpose(0, 1)
        torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
