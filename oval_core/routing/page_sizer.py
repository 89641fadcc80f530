"""Sizes of text pages from hidden states: short where the text says much, long where it says little.

A token's value becomes a density, in pages a token; the pages hold equal shares of it. Sinkhorn makes soft pages of that,
window by window, through which the sizing head learns; serving rounds them. Time and memory are linear in the text.

Shapes: T tokens, M pages, C hidden size, S steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from oval_core.config import MAX_PAGE_SIZE, MIN_PAGE_SIZE, check_int
from oval_core.errors import ConfigError
from oval_core.routing.view import EPS

WINDOW = 512
"""Tokens that are clustered at once."""

OVERLAP = 64
"""Tokens that neighbouring windows share; in them one fades into the other."""

_PIECE = 1024
_ITERATIONS = 5
_BLUR = 0.25  # of soft pages: at the centre of a page e^-4 of a token leaks to each neighbour
_VARIANCE_WEIGHT = 0.5
_BISECTIONS = 48
_SATURATED = 20.0  # distance from the shift at which a sigmoid is 0 or 1 in float32
_LARGEST_VALUE = 1e3
_LEAST_VARIANCE = 1e-12  # relative; where there is less, it is rounding


@dataclass(frozen=True, slots=True)
class SizingScale:
    """What a text says about itself, so that tokens that come later are judged as those before them.

    Attributes:
        unit: root of the mean variance of its hidden states: they are divided by it.
        shift: value at which a page would be half as long as the longest.
    """

    unit: float
    shift: float


@dataclass(frozen=True, slots=True)
class _Window:
    start: int
    first_page: int
    weights: torch.Tensor  # [tokens, pages], rows sum to 1
    fade: torch.Tensor  # [tokens], of all windows together 1 for each token


class DynamicPageSizer(nn.Module):
    """Splits a text into contiguous pages of 1..32 tokens; untrained, it goes by the variance alone.

    A token's value is `head(x) + 0.5 * var(x)`, where x is its hidden state divided by the root of the mean variance of
    the text: so the mean of `var(x)` is 1 for every model, and both terms have a scale of their own. A high value, a
    token that diverges from its surroundings, makes pages shorter. The size that a token wishes for is
    `1 + 31 * sigmoid(shift - value)`; the shift is such that pages hold `mean_size` tokens on average.
    """

    def __init__(self, hidden_size: int, mean_size: int = 16) -> None:
        """Makes an untrained sizer.

        Args:
            hidden_size: C.
            mean_size: tokens that a page holds on average, 1..32.
        """
        super().__init__()
        check_int("hidden_size", hidden_size, 1, None)
        check_int("mean_size", mean_size, MIN_PAGE_SIZE, MAX_PAGE_SIZE)
        self.mean_size = mean_size
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)  # what it does before training is known, and is no noise
        nn.init.zeros_(self.head.bias)

    def forward(self, hidden: torch.Tensor) -> list[int]:
        """Returns `sizes(hidden)`."""
        return self.sizes(hidden)

    @torch.no_grad()
    def sizes(self, hidden: torch.Tensor, mean_size: int | None = None) -> list[int]:
        """Returns the sizes of the pages, 1..32 each, T together.

        Args:
            hidden: last hidden states [T, C] of one text.
            mean_size: tokens that a page holds on average, in place of the sizer's own.
        """
        density = self._density(hidden, mean_size)
        position = density.new_zeros(len(density))
        for part in _windows(density):
            pages = torch.arange(part.weights.shape[1], device=density.device)
            where = part.first_page + part.weights @ pages.to(density.dtype)
            position[part.start : part.start + len(where)] += part.fade * where
        return page_sizes(position.round())

    def soft_assign(self, hidden: torch.Tensor, mean_size: int | None = None) -> torch.Tensor:
        """Returns what share of each token is in each page, [T, M], rows sum to 1; gradients reach the head.

        For training: the whole matrix, of which a band around the diagonal is not 0. Arguments as for `sizes`.
        """
        density = self._density(hidden, mean_size)
        windows = list(_windows(density))
        num_pages = max((w.first_page + w.weights.shape[1] for w in windows), default=0)
        shares = density.new_zeros(len(density), num_pages)
        for w in windows:
            rows = slice(w.start, w.start + len(w.weights))
            columns = slice(w.first_page, w.first_page + w.weights.shape[1])
            shares[rows, columns] += w.fade[:, None] * w.weights
        return shares

    @torch.no_grad()
    def scale(self, hidden: torch.Tensor, mean_size: int | None = None) -> SizingScale:
        """Returns the scale of a text, by which `fill` judges tokens that come after it."""
        if not len(hidden):
            return SizingScale(1.0, 0.0)
        values, (peak, root) = self._values(hidden)
        return SizingScale(float(peak) * float(root), float(_shift(values, self._mean(mean_size))))

    @torch.no_grad()
    def fill(self, hidden: torch.Tensor, scale: SizingScale) -> float:
        """Returns how full a page of these tokens is: from 1 on, the next token belongs to another page."""
        scaled = (_finite(hidden).double() / scale.unit).float()
        values = self._value(self._projected(scaled), _variance(scaled), scaled.new_ones(()))
        density = _wish(values, values.new_tensor(scale.shift)).reciprocal()
        # the middle of a next token like the last one, as at the prompt
        return float(density.sum() + density[-1] / 2)

    def _values(self, hidden: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Returns the values [T], and two numbers whose product is the root of the mean variance (it may overflow)."""
        if hidden.ndim != 2 or hidden.shape[1] != self.head.in_features:
            raise ConfigError(
                f"hidden: got shape {tuple(hidden.shape)}. Allowed: [tokens, {self.head.in_features}]. Give the last "
                "hidden states of one text."
            )
        # piece by piece: a float32 copy of all would take more memory than all the rest
        pieces = torch.split(hidden, _PIECE)
        peak = torch.stack([_finite(piece.detach()).abs().amax() for piece in pieces]).amax()
        peak = peak.clamp(min=torch.finfo(torch.float32).tiny)
        scaled = (_finite(piece) / peak for piece in pieces)
        seen = [(self._projected(piece), _variance(piece)) for piece in scaled]
        projected, variance = (torch.cat(side) for side in zip(*seen, strict=True))
        mean = variance.detach().mean()
        root = torch.where(mean > _LEAST_VARIANCE, mean, 1.0).sqrt()
        return self._value(projected, variance, root), (peak, root)

    def _projected(self, scaled: torch.Tensor) -> torch.Tensor:
        return F.linear(scaled, self.head.weight.float()).squeeze(-1)

    def _value(
        self, projected: torch.Tensor, variance: torch.Tensor, root: torch.Tensor
    ) -> torch.Tensor:
        bias = self.head.bias.float()
        values = projected / root + bias + _VARIANCE_WEIGHT * variance / root.square()
        return torch.nan_to_num(values).clamp(-_LARGEST_VALUE, _LARGEST_VALUE)

    def _mean(self, mean_size: int | None) -> int:
        mean_size = self.mean_size if mean_size is None else mean_size
        check_int("mean_size", mean_size, MIN_PAGE_SIZE, MAX_PAGE_SIZE)
        return mean_size

    def _density(self, hidden: torch.Tensor, mean_size: int | None) -> torch.Tensor:
        # pages a token, [T]; together T / mean_size
        mean_size = self._mean(mean_size)
        if not len(hidden):
            return hidden.new_zeros(0).float()
        values, _ = self._values(hidden)
        shift = _shift(values.detach(), mean_size)
        if values.requires_grad:
            shift = _implicit(shift, values, len(values) / mean_size)
        return _wish(values, shift).reciprocal()


def sizing_loss(shares: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
    """Returns how much log attention varies within pages: the variance in each, weighted by attention mass.

    Args:
        shares: [T, M] from `soft_assign`.
        attention: [T] or [S, T], mass that each token receives (in each step).
    """
    mass = attention.float().reshape(-1, attention.shape[-1])
    mass = mass / mass.sum(-1, keepdim=True).clamp(min=EPS)
    logs = (attention.float().reshape(mass.shape) + EPS).log()
    logs = logs - (mass * logs).sum(
        -1, keepdim=True
    )  # only differences count; small numbers lose no digits
    of_page = (mass @ shares).clamp(min=torch.finfo(shares.dtype).tiny)  # [S, M]
    between = ((mass * logs) @ shares).square() / of_page
    return ((mass * logs.square()).sum(-1) - between.sum(-1)).mean()


def page_sizes(page_of: torch.Tensor) -> list[int]:
    """Returns the sizes of the pages that tokens are assigned to, at most 32 each.

    A token never goes to an earlier page than the one before it; a page that is too long is split evenly.

    Args:
        page_of: whole numbers [T].
    """
    if not len(page_of):
        return []
    _, counts = torch.unique_consecutive(page_of.cummax(0).values, return_counts=True)
    sizes: list[int] = []
    for count in counts.tolist():
        parts = -(-count // MAX_PAGE_SIZE)
        sizes += [(count + i) // parts for i in range(parts)]
    return sizes


def bisect(
    total: Callable[[torch.Tensor], torch.Tensor],
    low: torch.Tensor,
    high: torch.Tensor,
    target: float,
) -> torch.Tensor:
    """Returns where `total`, which grows, reaches `target` between `low` and `high`; an end if it does not."""
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        is_less = total(middle) < target
        low, high = torch.where(is_less, middle, low), torch.where(is_less, high, middle)
    return (low + high) / 2


def mass_positions(density: torch.Tensor) -> torch.Tensor:
    """Returns where the middle of each token lies in the text, counted in pages, [T]."""
    return density.cumsum(0) - density / 2


def _finite(hidden: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(hidden.float())


def _variance(hidden: torch.Tensor) -> torch.Tensor:
    return (hidden - hidden.mean(-1, keepdim=True)).square().mean(-1)  # far faster than `var`


def _wish(values: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    span = MAX_PAGE_SIZE - MIN_PAGE_SIZE
    return MIN_PAGE_SIZE + span * torch.sigmoid(shift - values)


def _shift(values: torch.Tensor, mean_size: int) -> torch.Tensor:
    # fewer pages the larger the shift
    low, high = values.amin() - _SATURATED, values.amax() + _SATURATED
    return bisect(
        lambda shift: -_wish(values, shift).reciprocal().sum(), low, high, -len(values) / mean_size
    )


def _implicit(shift: torch.Tensor, values: torch.Tensor, num_pages: float) -> torch.Tensor:
    # The shift as a function of the values: d shift = -(d pages / d values) / (d pages / d shift).
    share = torch.sigmoid(shift - values.detach())
    size = _wish(values.detach(), shift)
    slope = -(MAX_PAGE_SIZE - MIN_PAGE_SIZE) * share * (1 - share) / size.square()
    step = (num_pages - _wish(values, shift).reciprocal().sum()) / slope.sum().clamp(max=-EPS)
    return shift + step - step.detach()


def _windows(density: torch.Tensor) -> Iterator[_Window]:
    """Soft pages of each window over [start, start + 512): page m is at m + 1/2 in `mass_positions`."""
    positions = mass_positions(density)
    count = len(density)
    stride = WINDOW - OVERLAP
    starts = range(0, max(count - OVERLAP, 1 if count else 0), stride)
    ramp = (torch.arange(OVERLAP, device=density.device) + 0.5) / OVERLAP
    page_of = positions.detach().floor().long().tolist()
    for start in starts:
        end = min(start + WINDOW, count)
        first, last = page_of[start], page_of[end - 1]
        low, high = max(first - 1, 0), min(last + 1, page_of[-1])
        fade = density.new_ones(end - start)
        if start > 0:
            fade[:OVERLAP] *= ramp
        if end < count:
            fade[-OVERLAP:] *= 1 - ramp
        # Pages that a window's end cuts may hold less of it than a token.
        least = density.new_full((high - low + 1,), float(MIN_PAGE_SIZE))
        least[: first - low + 1] = 0.0
        least[last - low :] = 0.0
        yield _Window(start, low, _sinkhorn(positions[start:end] - low, least), fade)


def _sinkhorn(positions: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Returns shares [n, M]: each row sums to 1, each column to between `least` [M] and 32.

    Tokens at `positions` [n] pay the squared distance to the centre of a page. The result is a softmax over pages plus
    a price for each page, so the page a token is nearest to never falls as its position grows.
    """
    centres = torch.arange(len(least), device=positions.device) + 0.5
    gain = -(positions[:, None] - centres).square() / _BLUR
    price = torch.zeros_like(least)
    for _ in range(_ITERATIONS):
        held = torch.softmax(gain + price, -1).sum(0).clamp(min=1e-30)
        bounded = torch.minimum(torch.maximum(held, least), held.new_tensor(float(MAX_PAGE_SIZE)))
        price = price + (bounded / held).log()
    return torch.softmax(gain + price, -1)
