"""Signals: how much attention a page will get, judged by a summary of its keys and a query. Reads no K/V itself.

Most are linear: score = embed(query) . summary. Shapes: n tokens of a page, D head dim, E length of a summary,
L layers, H query heads, K KV heads, G layer groups, P pages.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F

from oval_core.config import MAX_PAGE_SIZE

_NUM_REPRESENTATIVES = 4
_ROUNDS = 6


class KeySignal(Protocol):
    """Scores pages by key summaries; `embed` includes the scaling."""

    name: ClassVar[str]
    is_mean: ClassVar[bool]
    """Whether a score is a mean over the tokens, so that the log of their number makes it a mass."""

    @property
    def scaling(self) -> float:
        """The factor on q.k."""
        ...

    def summarise(
        self,
        keys: torch.Tensor,
        valid: torch.Tensor | None = None,
        received: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the summary [..., E] of a page, float32.

        Args:
            keys: [..., n, D] after RoPE.
            valid: bool, broadcasts to [..., n]: which of them are tokens of the page; None means all. At least one is.
            received: [..., n] attention that each token received; only `infllm` asks for it.
        """
        ...

    def score(self, query: torch.Tensor, summaries: torch.Tensor) -> torch.Tensor:
        """Returns scores [..., H, P] of queries [..., H, D] after RoPE against summaries [..., K, P, E].

        Heads that share a KV head are neighbours. Several queries of a head may stand as so many heads.
        """
        ...


class _Linear(ABC):
    """A signal whose score is the product of an embedded query with a summary."""

    __slots__ = ()

    @abstractmethod
    def embed(self, query: torch.Tensor) -> torch.Tensor:
        """Returns [..., E] of queries [..., D] after RoPE."""

    def score(self, query: torch.Tensor, summaries: torch.Tensor) -> torch.Tensor:
        """Returns scores [..., H, P]; see `KeySignal.score`."""
        return page_scores(self.embed(query).to(summaries.dtype), summaries)


def _signed(query: torch.Tensor, scaling: float) -> torch.Tensor:
    query = query.float() * scaling
    return torch.cat((query.clamp(min=0), query.clamp(max=0)), dim=-1)


def _mean(values: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    # [..., n, D] -> [..., D]
    if valid is None:
        return values.mean(-2)
    weights = valid.to(values.dtype)[..., None]
    return (values * weights).sum(-2) / weights.sum(-2)


def _bounds(keys: torch.Tensor, valid: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if valid is None:
        return keys.amin(-2), keys.amax(-2)
    absent = ~valid[..., None]
    lower = keys.masked_fill(absent, float("inf")).amin(-2)
    return lower, keys.masked_fill(absent, float("-inf")).amax(-2)


@dataclass(frozen=True, slots=True)
class Quest(_Linear):
    """Upper bound of the largest q.k in the page (arXiv 2406.10774)."""

    scaling: float
    name: ClassVar[str] = "quest"
    is_mean: ClassVar[bool] = False

    def summarise(
        self,
        keys: torch.Tensor,
        valid: torch.Tensor | None = None,
        received: torch.Tensor | None = None,  # noqa: ARG002 - for `infllm`
    ) -> torch.Tensor:
        """Returns [..., 2 D]: elementwise maximum, then minimum."""
        lower, upper = _bounds(keys.float(), valid)
        return torch.cat((upper, lower), dim=-1)

    def embed(self, query: torch.Tensor) -> torch.Tensor:
        """Returns [..., 2 D]: the positive part of the query, then the negative one."""
        return _signed(query, self.scaling)


@dataclass(frozen=True, slots=True)
class Arkvale(_Linear):
    """As `Quest`, with bounds that lie one mean deviation around the centre (ArkVale)."""

    scaling: float
    name: ClassVar[str] = "arkvale"
    is_mean: ClassVar[bool] = False

    def summarise(
        self,
        keys: torch.Tensor,
        valid: torch.Tensor | None = None,
        received: torch.Tensor | None = None,  # noqa: ARG002 - for `infllm`
    ) -> torch.Tensor:
        """Returns [..., 2 D]: centre plus radius, then centre minus radius."""
        keys = keys.float()
        lower, upper = _bounds(keys, valid)
        centre = (lower + upper) / 2
        radius = _mean((keys - centre[..., None, :]).abs(), valid)
        return torch.cat((centre + radius, centre - radius), dim=-1)

    def embed(self, query: torch.Tensor) -> torch.Tensor:
        """Returns [..., 2 D]: the positive part of the query, then the negative one."""
        return _signed(query, self.scaling)


@dataclass(frozen=True, slots=True)
class MeanKey(_Linear):
    """Mean of q.k over the page."""

    scaling: float
    name: ClassVar[str] = "mean_key"
    is_mean: ClassVar[bool] = True

    def summarise(
        self,
        keys: torch.Tensor,
        valid: torch.Tensor | None = None,
        received: torch.Tensor | None = None,  # noqa: ARG002 - for `infllm`
    ) -> torch.Tensor:
        """Returns [..., D]: the mean key."""
        return _mean(keys.float(), valid)

    def embed(self, query: torch.Tensor) -> torch.Tensor:
        """Returns [..., D]: the scaled query."""
        return query.float() * self.scaling


@dataclass(frozen=True, slots=True)
class Estimate(_Linear):
    """Log of the mean of exp(q.k) if the page's keys were Gaussian with independent elements; exact for one token."""

    scaling: float
    name: ClassVar[str] = "estimate"
    is_mean: ClassVar[bool] = True

    def summarise(
        self,
        keys: torch.Tensor,
        valid: torch.Tensor | None = None,
        received: torch.Tensor | None = None,  # noqa: ARG002 - for `infllm`
    ) -> torch.Tensor:
        """Returns [..., 2 D]: mean, then variance over the tokens."""
        keys = keys.float()
        mean = _mean(keys, valid)
        variance = _mean((keys - mean[..., None, :]).square(), valid)
        return torch.cat((mean, variance), dim=-1)

    def embed(self, query: torch.Tensor) -> torch.Tensor:
        """Returns [..., 2 D]: the scaled query, then half its square."""
        query = query.float() * self.scaling
        return torch.cat((query, query.square() / 2), dim=-1)


@dataclass(frozen=True, slots=True)
class Infllm(_Linear):
    """Mean of q.k over the four tokens that received most attention (InfLLM, arXiv 2402.04617)."""

    scaling: float
    name: ClassVar[str] = "infllm"
    is_mean: ClassVar[bool] = True

    def summarise(
        self,
        keys: torch.Tensor,
        valid: torch.Tensor | None = None,
        received: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns [..., D]: the mean of the representatives; of all tokens where `received` is None."""
        keys = keys.float()
        if received is None:
            return _mean(keys, valid)
        rank = received.float().expand(keys.shape[:-1])
        if valid is not None:
            rank = rank.masked_fill(~valid, float("-inf"))
        best = rank.topk(min(_NUM_REPRESENTATIVES, rank.shape[-1]), dim=-1).indices
        chosen = torch.zeros_like(rank, dtype=torch.bool).scatter(-1, best, True)
        return _mean(keys, chosen if valid is None else chosen & valid)

    def embed(self, query: torch.Tensor) -> torch.Tensor:
        """Returns [..., D]: the scaled query."""
        return query.float() * self.scaling


@dataclass(frozen=True, slots=True)
class Sketch:
    """Log of the page's mass if its keys lay in a plane: mean, two directions, each token's place along them.

    Post-RoPE keys of 16 neighbouring tokens nearly do. What lies outside counts as Gaussian noise, alike in every
    direction, which makes the mass come out nearly unbiased. As many bytes as 1.8 Quest summaries for 16 tokens of 64
    elements; measured in docs/decisions.md.
    """

    scaling: float
    most_tokens: int = MAX_PAGE_SIZE
    name: ClassVar[str] = "sketch"
    is_mean: ClassVar[bool] = False
    rank: ClassVar[int] = 2

    def summarise(
        self,
        keys: torch.Tensor,
        valid: torch.Tensor | None = None,
        received: torch.Tensor | None = None,  # noqa: ARG002 - a `KeySignal`
    ) -> torch.Tensor:
        """Returns [..., 3 D + 2 most_tokens + 2]: mean, directions, places, noise variance, number of tokens."""
        keys = keys.float()
        count = keys.shape[-2]
        present = keys.new_ones(keys.shape[:-1]) if valid is None else valid.to(keys.dtype)
        present, order = torch.sort(
            present.expand(keys.shape[:-1]), stable=True, dim=-1, descending=True
        )
        keys = keys.gather(-2, order[..., None].expand(keys.shape))  # absent tokens last
        tokens = present.sum(-1, keepdim=True)
        mean = (keys * present[..., None]).sum(-2) / tokens
        centred = (keys - mean[..., None, :]) * present[..., None]
        axes = _leading_axes(centred, self.rank)  # [..., rank, D]
        places = centred @ axes.transpose(-1, -2)  # [..., n, rank]
        noise = (centred - places @ axes).square().sum((-1, -2))[..., None] / tokens
        places = F.pad(places.transpose(-1, -2), (0, self.most_tokens - count))
        parts = (mean, axes.flatten(-2), places.flatten(-2), noise / keys.shape[-1], tokens)
        return torch.cat(parts, dim=-1)

    def score(self, query: torch.Tensor, summaries: torch.Tensor) -> torch.Tensor:
        """Returns scores [..., H, P]; see `KeySignal.score`."""
        dim, rank, most = query.shape[-1], self.rank, self.most_tokens
        sizes = [dim * (1 + rank), rank * most, 1, 1]
        axes, places, noise, tokens = torch.split(summaries, sizes, dim=-1)
        query = query.float() * self.scaling
        pages = summaries.shape[-2]
        flat = axes.reshape(*axes.shape[:-2], pages * (1 + rank), dim)
        along = page_scores(query.to(axes.dtype), flat).float()  # [..., H, P * (1 + rank)]
        along = along.view(*along.shape[:-1], pages, 1 + rank)
        kv_heads = summaries.shape[-3]
        group = query.shape[-2] // kv_heads
        by_kv = along.reshape(*along.shape[:-3], kv_heads, group, pages, 1 + rank)
        spots = places.float().view(*places.shape[:-1], rank, most)[..., None, :, :, :]
        scores = by_kv[..., :1]
        for i in range(rank):
            scores = scores + by_kv[..., 1 + i : 2 + i] * spots[..., i, :]
        absent = torch.arange(most, device=scores.device) >= tokens.float()
        scores = scores.masked_fill(absent[..., None, :, :], float("-inf")).logsumexp(-1)
        energy = query.square().sum(-1).view(*query.shape[:-2], kv_heads, group, 1)
        scores = scores + energy * noise.float()[..., None, :, 0] / 2
        return scores.flatten(-3, -2)


SIGNALS: dict[str, Callable[[float], KeySignal]] = {
    signal.name: signal for signal in (Quest, Arkvale, MeanKey, Estimate, Infllm, Sketch)
}
"""Every signal by its name, made from the factor on q.k."""


def create_signal(name: str, scaling: float, most_tokens: int = MAX_PAGE_SIZE) -> KeySignal:
    """Returns the signal of this name.

    Args:
        name: one of `SIGNALS`.
        scaling: factor on q.k.
        most_tokens: of a page.
    """
    if name == Sketch.name:
        return Sketch(scaling, most_tokens)
    return SIGNALS[name](scaling)


def _leading_axes(centred: torch.Tensor, rank: int) -> torch.Tensor:
    """Returns the leading right singular directions [..., rank, D] of rows [..., n, D], by subspace iteration.

    Six rounds from a fixed start: within a page the first two stand out far enough, and it takes a fifteenth of an SVD.
    """
    if centred.shape[-2] < rank:
        centred = F.pad(centred, (0, 0, 0, rank - centred.shape[-2]))
    count = centred.shape[-2]
    gram = centred @ centred.transpose(-1, -2)  # [..., n, n]
    start = torch.cos(torch.arange(count * rank, dtype=torch.float32) ** 1.5 + 1.0)
    basis = start.view(count, rank).to(centred.device).expand(*gram.shape[:-1], rank)
    for _ in range(_ROUNDS):
        basis = torch.linalg.qr(gram @ basis)[0]
    axes = (centred.transpose(-1, -2) @ basis).transpose(-1, -2)  # [..., rank, D]
    first = axes[..., 0, :]
    first = first / first.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    second = axes[..., 1, :]
    second = second - (second * first).sum(-1, keepdim=True) * first
    second = second / second.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    return torch.stack((first, second), dim=-2)


def page_scores(phi: torch.Tensor, summaries: torch.Tensor) -> torch.Tensor:
    """Returns scores [..., H, P]: each query head against the summaries of its KV head.

    Args:
        phi: [..., H, E] embedded queries; heads that share a KV head are neighbours. Several queries of a head may
            stand as so many heads.
        summaries: [..., K, P, E].
    """
    *leading, heads, width = phi.shape
    kv_heads = summaries.shape[-3]
    by_kv = phi.reshape(*leading, kv_heads, heads // kv_heads, width)
    return (by_kv @ summaries.transpose(-1, -2)).flatten(-3, -2)


def group_log_mass(
    scores: torch.Tensor,
    counts: torch.Tensor,
    group_of_layer: Sequence[int],
    *,
    is_mean: bool = False,
) -> torch.Tensor:
    """Returns [..., G, P]: log of the attention mass of each page, mean over the heads and layers of a group.

    Args:
        scores: [..., L, H, P] of one signal.
        counts: long, broadcasts to [..., P]: tokens of each page; a page without tokens has no mass.
        group_of_layer: the group of each of the L layers, 0..G-1, each used.
        is_mean: whether the scores are means over the tokens, as the signal says.
    """
    groups = torch.tensor(group_of_layer, device=scores.device)
    assert len(groups) == scores.shape[-3], "one group a layer"
    counts = counts[..., None, None, :]
    if is_mean:
        scores = scores + counts.clamp(min=1).log().to(scores.dtype)
    logs = scores.masked_fill(counts == 0, float("-inf")).log_softmax(-1)
    masses = []
    for group in range(int(groups.max()) + 1):
        members = logs[..., groups == group, :, :].flatten(-3, -2)  # [..., layers * H, P]
        # not the log of a mean: a page of little mass keeps its rank where exp would be zero
        masses.append(members.logsumexp(-2) - math.log(members.shape[-2]))
    return torch.stack(masses, dim=-2)
