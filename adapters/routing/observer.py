"""Sums up the attention of a passage by page, layer after layer, as its queries pass. Knows nothing of transformers.

Shapes: n queries of a piece, L tokens so far, H query heads, K KV heads, D head dim, E value head dim, P pages,
S tokens of the largest page, R = T + 1 rows: the last query of the prompt and those of the steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from oval_core.routing.key_signals import KeySignal, group_log_mass
from oval_core.routing.recording import PROMPT_WINDOW
from oval_core.routing.view import EPS

LOCAL_WINDOW = 64
"""Queries from a token on whose attention counts as received by it (InfLLM's local window)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """What is fixed before the first query: pages, groups and head shapes."""

    context: int
    num_steps: int
    starts: torch.Tensor
    counts: torch.Tensor
    group_of_layer: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    output_every: int

    @property
    def length(self) -> int:
        """Tokens in all."""
        return self.context + self.num_steps

    @property
    def num_groups(self) -> int:
        """G."""
        return max(self.group_of_layer) + 1

    @property
    def routed(self) -> list[int]:
        """Layers that are in a group."""
        return [layer for layer, group in enumerate(self.group_of_layer) if group >= 0]

    @property
    def window(self) -> int:
        """Queries at the end of the prompt that are observed one by one."""
        return min(PROMPT_WINDOW, self.context)


class Observer:
    """Attends for a model and adds up what each page received.

    Attributes:
        mass, peak: [W + T, G, P] as in `Recording`, from the last W queries of the prompt on.
        effect: [T, G, P] as in `Recording`.
        token_sum: [G, length] attention that the tokens received from all queries of the prompt.
        sampled, part_mass, part_output: as in `Recording`.
    """

    def __init__(self, passage: Passage) -> None:
        self._passage = p = passage
        num_pages, steps, groups = len(p.starts), p.num_steps, p.num_groups
        self.mass = torch.zeros(p.window + steps, groups, num_pages)
        self.peak = torch.zeros_like(self.mass)
        self.effect = torch.zeros(steps, groups, num_pages)
        self.token_sum = torch.zeros(groups, p.length)
        every = p.output_every or steps + 1
        self.sampled = torch.arange(0, steps if p.output_every else 0, every)
        shape = (len(self.sampled), len(p.routed), p.num_heads, num_pages)
        self.part_mass = torch.zeros(shape)
        self.part_output = torch.zeros(*shape, 0, dtype=torch.bfloat16)
        self._received: dict[int, torch.Tensor] = {}  # layer -> [K, length]
        self._queries: dict[int, torch.Tensor] = {}  # layer -> [H, R, D]
        self._ahead: dict[int, torch.Tensor] = {}
        self._place = {layer: place for place, layer in enumerate(p.routed)}
        offsets = torch.arange(int(p.counts.max()))
        self._tokens = p.starts[:, None] + offsets  # [P, S]
        self._is_token = offsets < p.counts[:, None]
        self._page_of = torch.repeat_interleave(torch.arange(num_pages), p.counts)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Returns the output [H, n, E] of causal attention; the queries [H, n, D] are the last of the L tokens."""
        num_queries, length = query.shape[1], keys.shape[1]
        first = length - num_queries
        is_observed = first >= self._passage.context - self._passage.window
        if is_observed:  # few queries, to the digit; the many before them in the model's own dtype
            self.note_queries(self._queries, layer, query, first)
            query, keys, values = query.float(), keys.float(), values.float()
        weights = _weights(query, keys, scaling)
        by_kv = weights.view(keys.shape[0], -1, length).to(values.dtype)
        output = (by_kv @ values).view(query.shape[0], num_queries, -1)
        group = self._passage.group_of_layer[layer]
        if group >= 0:
            self._receive(layer, group, weights, first)
            if is_observed:
                self._observe(layer, weights, values, output)
        return output

    def note_ahead(self, layer: int, query: torch.Tensor, first: int) -> None:
        """Keeps queries [H, n, D] of this layer that the layer before predicted; the first is token `first`'s."""
        self.note_queries(self._ahead, layer, query, first)

    def note_queries(
        self, kept: dict[int, torch.Tensor], layer: int, query: torch.Tensor, first: int
    ) -> None:
        """Keeps those of the last query of the prompt and of the steps."""
        if layer not in self._place:
            return
        row = first - (self._passage.context - 1)
        query = query[:, max(0, -row) :].float()
        if query.shape[1]:
            rows = self._passage.num_steps + 1
            store = kept.setdefault(layer, query.new_zeros(query.shape[0], rows, query.shape[2]))
            store[:, max(0, row) : max(0, row) + query.shape[1]] = query

    def _receive(self, layer: int, group: int, weights: torch.Tensor, first: int) -> None:
        p = self._passage
        heads, num_queries, length = weights.shape
        if first < p.context:
            share = heads * p.group_of_layer.count(group)
            self.token_sum[group, :length] += weights.sum((0, 1)) / share
        start = max(0, first - LOCAL_WINDOW + 1)
        near = weights[:, :, start:]
        ages = torch.arange(first, length)[:, None] - torch.arange(start, length)
        near = (near * (ages < LOCAL_WINDOW)).sum(1).view(p.num_kv_heads, -1, length - start)
        received = self._received.setdefault(layer, torch.zeros(p.num_kv_heads, p.length))
        received[:, start:length] += near.sum(1)

    def _observe(
        self, layer: int, weights: torch.Tensor, values: torch.Tensor, output: torch.Tensor
    ) -> None:
        p = self._passage
        kv_heads, length, dim = values.shape
        heads, num_queries, _ = weights.shape
        first = length - num_queries
        group, num_layers = p.group_of_layer[layer], p.group_of_layer.count(p.group_of_layer[layer])
        num_pages = int((p.starts < length).sum())
        index = self._padded(length)[:num_pages]
        by_token = _with_zero(weights.view(kv_heads, -1, length).transpose(1, 2))
        parts = by_token[:, index].flatten(0, 1)  # [K * P, S, H/K * n]
        by_head = (kv_heads, num_pages, heads // kv_heads, num_queries)
        mass = parts.sum(1).view(by_head)
        of_heads = mass.permute(0, 2, 3, 1).flatten(0, 1)  # [H, n, P]
        row = first - (p.context - p.window)
        rows = slice(row, row + num_queries)
        self.mass[rows, group, :num_pages] += of_heads.mean(0) / num_layers
        peak = self.peak[rows, group, :num_pages]
        torch.maximum(peak, of_heads.amax(0), out=peak)
        if first < p.context:
            return
        part = parts.transpose(1, 2) @ _with_zero(values)[:, index].flatten(0, 1)
        part = part.view(*by_head, dim)
        self._sample(layer, of_heads, part, first - p.context)
        by_kv = output.view(kv_heads, 1, heads // kv_heads, num_queries, dim)
        # p/(1-p) * |o - vbar| = |o_P - p o| / (1-p), with o_P = p * vbar
        moved = part.addcmul_(mass[..., None], by_kv, value=-1).norm(dim=-1)
        moved = moved / (1 - mass).clamp(min=1e-6) / by_kv.norm(dim=-1).clamp(min=1e-12)
        steps = slice(first - p.context, length - p.context)
        self.effect[steps, group, :num_pages] += moved.mean((0, 2)).T / num_layers

    def _sample(self, layer: int, mass: torch.Tensor, part: torch.Tensor, step: int) -> None:
        num_queries, dim = mass.shape[1], part.shape[-1]
        if self.part_output.shape[-1] != dim:
            self.part_output = self.part_output.new_zeros(*self.part_mass.shape, dim)
        slots = ((self.sampled >= step) & (self.sampled < step + num_queries)).nonzero()[:, 0]
        taken = self.sampled[slots] - step
        num_pages, place = mass.shape[-1], self._place[layer]
        self.part_mass[slots, place, :, :num_pages] = mass[:, taken].transpose(0, 1)
        of_heads = part[:, :, :, taken].permute(3, 0, 2, 1, 4).flatten(1, 2)  # [N', H, P, E]
        self.part_output[slots, place, :, :num_pages] = of_heads.bfloat16()

    def _padded(self, length: int) -> torch.Tensor:
        # Places beyond the page or the text point behind the last token, where there is a zero.
        return self._tokens.masked_fill(~self._is_token, length).clamp(max=length)

    def log_mass(
        self, signal: KeySignal, keys: Mapping[int, torch.Tensor], *, ahead: bool = False
    ) -> torch.Tensor:
        """Returns [R, G, P]: what a signal says of each page, as in `Recording.signals`.

        Args:
            signal: scores pages by their keys.
            keys: by layer [K, length, D], after RoPE.
            ahead: with the queries that the layer before predicted, in place of the true ones.
        """
        p = self._passage
        lengths = p.context + torch.arange(p.num_steps + 1)  # tokens up to the row's query
        queries = self._ahead if ahead else self._queries
        scores = torch.stack(
            [
                self._scores(signal, queries[layer], keys[layer].float(), self._received[layer])
                for layer in p.routed
            ],
            dim=1,
        )
        counts = (lengths[:, None] - p.starts).clamp(min=0).minimum(p.counts)
        groups = [p.group_of_layer[layer] for layer in p.routed]
        logs = group_log_mass(scores, counts, groups, is_mean=signal.is_mean)
        return logs.masked_fill(counts[:, None] == 0, torch.tensor(EPS).log().item())

    def _scores(
        self,
        signal: KeySignal,
        query: torch.Tensor,
        keys: torch.Tensor,
        received: torch.Tensor,
    ) -> torch.Tensor:
        # [R, H, P]. The newest page was not full yet: a row knows only its tokens up to the row's own.
        p = self._passage
        index = self._padded(p.length)
        full = signal.summarise(
            _with_zero(keys)[:, index], self._is_token, _with_zero(received[..., None])[:, index, 0]
        )
        heads, rows, _ = query.shape
        scores = signal.score(query.flatten(0, 1), full).view(heads, rows, -1)
        newest = p.context - 1 + torch.arange(p.num_steps + 1)
        page = self._page_of[newest]
        tokens = self._tokens[page]  # [R, S]
        tail = signal.summarise(
            keys[:, tokens.clamp(max=p.length - 1)], tokens <= newest[:, None]
        )  # [K, R, E]
        by_row = signal.score(query.transpose(0, 1), tail.transpose(0, 1)[:, :, None])  # [R, H, 1]
        own = by_row[..., 0].transpose(0, 1)
        return scores.scatter(2, page[:, None].expand(*own.shape, 1), own[..., None]).transpose(
            0, 1
        )


def _weights(query: torch.Tensor, keys: torch.Tensor, scaling: float) -> torch.Tensor:
    """Returns causal attention weights [H, n, L], float32; queries [H, n, D] are the last tokens of keys [K, L, D]."""
    heads, num_queries, dim = query.shape
    kv_heads, length, _ = keys.shape
    by_kv = query.reshape(kv_heads, -1, dim)
    scores = torch.baddbmm(by_kv.new_empty(1), by_kv, keys.transpose(1, 2), beta=0, alpha=scaling)
    scores = scores.float().view(heads, num_queries, length)
    later = torch.ones(num_queries, num_queries, dtype=torch.bool).triu(1)
    scores[:, :, length - num_queries :].masked_fill_(later, float("-inf"))
    return torch.softmax(scores, dim=-1)


def _with_zero(rows: torch.Tensor) -> torch.Tensor:
    # [B, L, X] -> [B, L + 1, X] with a row of zeros at the end, contiguous
    return torch.cat((rows, rows.new_zeros(rows.shape[0], 1, rows.shape[2])), dim=1)
