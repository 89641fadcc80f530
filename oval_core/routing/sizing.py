"""Where text pages end: `fixed`, `key_similarity`, `attention_entropy` and `dynamic` under one contract.

A method reads evidence about a text and returns the sizes of its pages; then, as tokens are added, it says when the open
page at the end is done, by the same rule and by a gauge that it took from the text.

Shapes: T tokens, D head dim, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from oval_core.config import MAX_PAGE_SIZE, MIN_PAGE_SIZE, SIZING_NAMES, check_int
from oval_core.errors import ConfigError, did_you_mean
from oval_core.routing.page_sizer import (
    DynamicPageSizer,
    SizingScale,
    bisect,
    mass_positions,
    page_sizes,
)

Gauge = tuple[float, ...]
"""What a method took from a text to judge later tokens by; its meaning is the method's own."""

_PRICE_ROUNDS = 12
_LARGEST_PRICE = 16.0
_LEAST_ENTROPY = 1e-6  # of a token: even one that nothing reads takes its place


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of the tokens of a text, or of its open page at the end. Only what a method needs must be there.

    Attributes:
        num_tokens: T.
        hidden: last hidden states [T, C].
        keys: keys [..., T, D], of one layer or of several of one shape; similarities are averaged over the rest.
        attention: attention mass [T] that each token receives, mean over the queries that saw it.
    """

    num_tokens: int
    hidden: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    attention: torch.Tensor | None = None


class PageSizing(Protocol):
    """A method to choose where text pages end; pages hold `page_size` tokens on average."""

    name: str
    needs: frozenset[str]
    """Which parts of `Evidence` it reads: `hidden`, `keys`, `attention`."""

    def sizes(self, evidence: Evidence) -> list[int]:
        """Returns the sizes of the pages of a text, 1..32 each, T together."""
        ...

    def gauge(self, evidence: Evidence) -> Gauge:
        """Returns what `is_tail_done` must know of the text before."""
        ...

    def is_tail_done(self, tail: Evidence, gauge: Gauge) -> bool:
        """Whether the open page should end after its last token, where it is not full."""
        ...


class FixedSizing:
    """Every page holds `page_size` tokens; the open page is done when it is full."""

    name = "fixed"
    needs: frozenset[str] = frozenset()

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size

    def sizes(self, evidence: Evidence) -> list[int]:
        """Returns full pages and a rest."""
        full, rest = divmod(evidence.num_tokens, self._page_size)
        return [self._page_size] * full + [rest] * (rest > 0)

    def gauge(self, evidence: Evidence) -> Gauge:  # noqa: ARG002
        """Returns nothing."""
        return ()

    def is_tail_done(self, tail: Evidence, gauge: Gauge) -> bool:  # noqa: ARG002
        """Whether it is full."""
        return tail.num_tokens >= self._page_size


class KeySimilaritySizing:
    """Pages end where neighbouring keys are least alike, for a price on pages that are longer or shorter than most.

    The cost of a page is `(size / page_size - 1)^2` and, where another follows, the standardised cosine of the keys on
    both sides of its end. Dynamic programming finds the least sum, O(32 T); a price a page sets their number.
    The open page is done when its last two keys are less alike than all but one in `page_size` neighbours of the text: it
    then ends one token behind the dip, which is known only when that token is there.
    """

    name = "key_similarity"
    needs = frozenset({"keys"})

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size

    def sizes(self, evidence: Evidence) -> list[int]:
        """Returns the cheapest partition."""
        count = evidence.num_tokens
        similarity = _neighbour_similarity(_needed(evidence.keys, "keys", self.name))
        if count <= 1:
            return [1] * count
        spread = max(float(similarity.std()), 1e-6)
        steps = (similarity - similarity.mean()) / spread
        return _priced_partition(steps, count, self._page_size)

    def gauge(self, evidence: Evidence) -> Gauge:
        """Returns the similarity that one in `page_size` neighbours falls short of."""
        similarity = _neighbour_similarity(_needed(evidence.keys, "keys", self.name))
        return (float(np.quantile(similarity, 1 / self._page_size)) if len(similarity) else -1.0,)

    def is_tail_done(self, tail: Evidence, gauge: Gauge) -> bool:
        """Whether it is as long as can be, or its last two keys are unlike."""
        if tail.num_tokens >= MAX_PAGE_SIZE:
            return True
        similarity = _neighbour_similarity(_needed(tail.keys, "keys", self.name))
        return len(similarity) > 0 and float(similarity[-1]) < gauge[0]


class AttentionEntropySizing:
    """Pages hold equal shares of the entropy of attention: of -p log p, summed over their tokens.

    No token takes more than a page of its own, nor less than a 32nd of one. The open page is done when its share is full.
    """

    name = "attention_entropy"
    needs = frozenset({"attention"})

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size

    def sizes(self, evidence: Evidence) -> list[int]:
        """Returns pages of equal entropy."""
        if evidence.num_tokens == 0:
            return []
        return page_sizes(mass_positions(self._density(evidence, self.gauge(evidence))).floor())

    def gauge(self, evidence: Evidence) -> Gauge:
        """Returns the logarithm of the pages that a unit of entropy fills."""
        entropy = _entropy(_needed(evidence.attention, "attention", self.name))
        if not len(entropy):
            return (0.0,)
        low = entropy.amax().log().neg() - np.log(MAX_PAGE_SIZE)  # every token at its least
        high = entropy.amin().log().neg()  # every token a page
        pages = len(entropy) / self._page_size
        return (float(bisect(lambda x: _density_of(entropy, x).sum(), low, high, pages)),)

    def is_tail_done(self, tail: Evidence, gauge: Gauge) -> bool:
        """Whether it is as long as can be, or its share is full."""
        density = self._density(tail, gauge)
        return tail.num_tokens >= MAX_PAGE_SIZE or float(density.sum() + density[-1] / 2) >= 1

    def _density(self, evidence: Evidence, gauge: Gauge) -> torch.Tensor:
        entropy = _entropy(_needed(evidence.attention, "attention", self.name))
        return _density_of(entropy, entropy.new_tensor(gauge[0]))


class DynamicSizing:
    """Pages of a `DynamicPageSizer`; the open page is done when its tokens' densities add up to a page."""

    name = "dynamic"
    needs = frozenset({"hidden"})

    def __init__(self, sizer: DynamicPageSizer, page_size: int) -> None:
        self._sizer = sizer
        self._page_size = page_size

    def sizes(self, evidence: Evidence) -> list[int]:
        """Returns what the sizer says."""
        return self._sizer.sizes(_needed(evidence.hidden, "hidden", self.name), self._page_size)

    def gauge(self, evidence: Evidence) -> Gauge:
        """Returns the scale of the text."""
        hidden = _needed(evidence.hidden, "hidden", self.name)
        scale = self._sizer.scale(hidden, self._page_size)
        return (scale.unit, scale.shift)

    def is_tail_done(self, tail: Evidence, gauge: Gauge) -> bool:
        """Whether it is as long as can be, or full by the scale of the text."""
        hidden = _needed(tail.hidden, "hidden", self.name)
        return (
            tail.num_tokens >= MAX_PAGE_SIZE or self._sizer.fill(hidden, SizingScale(*gauge)) >= 1
        )


def create_sizing(name: str, page_size: int, sizer: DynamicPageSizer | None = None) -> PageSizing:
    """Returns the method of this name.

    Args:
        name: one of `SIZING_NAMES`.
        page_size: tokens that a page holds on average, 1..32.
        sizer: for `dynamic`: what decides.
    Raises:
        ConfigError: no such method, or no sizer for `dynamic`.
    """
    check_int("page_size", page_size, MIN_PAGE_SIZE, MAX_PAGE_SIZE)
    plain: dict[str, Callable[[int], PageSizing]] = {
        "attention_entropy": AttentionEntropySizing,
        "fixed": FixedSizing,
        "key_similarity": KeySimilaritySizing,
    }
    if name in plain:
        return plain[name](page_size)
    if name != DynamicSizing.name:
        raise ConfigError(f"sizing: got {name!r}; {did_you_mean(str(name), SIZING_NAMES)}")
    if sizer is None:
        raise ConfigError(
            "sizing: got 'dynamic' without a sizer. Allowed: with a DynamicPageSizer for the model's hidden size. "
            "Pass one, or choose another sizing."
        )
    return DynamicSizing(sizer, page_size)


def _needed(tensor: torch.Tensor | None, what: str, name: str) -> torch.Tensor:
    assert tensor is not None, f"{name} sizing needs {what}"
    return tensor


def _neighbour_similarity(keys: torch.Tensor) -> np.ndarray:
    # mean cosine of each token with the next, float64 [T - 1]
    unit = F.normalize(torch.nan_to_num(keys.float()), dim=-1)
    cosine = (unit[..., 1:, :] * unit[..., :-1, :]).sum(-1)
    return cosine[None].mean(tuple(range(cosine.ndim))).double().cpu().numpy()


def _entropy(attention: torch.Tensor) -> torch.Tensor:
    mass = torch.nan_to_num(attention.float()).clamp(0, 1)
    entropy: torch.Tensor = torch.special.entr(mass)
    return entropy.clamp(min=_LEAST_ENTROPY)


def _density_of(entropy: torch.Tensor, log_factor: torch.Tensor) -> torch.Tensor:
    return (entropy * log_factor.exp()).clamp(1 / MAX_PAGE_SIZE, 1 / MIN_PAGE_SIZE)


def _priced_partition(steps: np.ndarray, count: int, mean_size: int) -> list[int]:
    # The dearer a page, the fewer there are: look for the price that gives as many as pages of the mean size.
    wanted = -(-count // mean_size)
    low, high, price = -_LARGEST_PRICE, _LARGEST_PRICE, 0.0
    best: list[int] = []
    for _ in range(_PRICE_ROUNDS):
        sizes = _cheapest_partition(steps, count, mean_size, price)
        if not best or abs(len(sizes) - wanted) < abs(len(best) - wanted):
            best = sizes
        if len(sizes) == wanted:
            break
        low, high = (price, high) if len(sizes) > wanted else (low, price)
        price = (low + high) / 2
    return best


def _cheapest_partition(steps: np.ndarray, count: int, mean_size: int, price: float) -> list[int]:
    """Returns the sizes of least cost; `steps` [count - 1] is what a border behind each token costs."""
    lengths = np.arange(MAX_PAGE_SIZE, 0, -1)
    cost = (lengths / mean_size - 1) ** 2 + price
    cost_of_last = np.where(lengths < mean_size, price, cost)  # the last page is not complete yet
    border = np.append(steps, 0.0)
    least = np.zeros(count + 1)
    start_of = np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        start = max(0, end - MAX_PAGE_SIZE)
        of_page = cost if end < count else cost_of_last
        sums = least[start:end] + of_page[MAX_PAGE_SIZE - (end - start) :]
        best = int(sums.argmin())
        least[end] = sums[best] + border[end - 1]
        start_of[end] = start + best
    sizes: list[int] = []
    end = count
    while end > 0:
        sizes.append(end - int(start_of[end]))
        end = int(start_of[end])
    return sizes[::-1]
