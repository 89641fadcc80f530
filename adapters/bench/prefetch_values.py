"""What a prefetch benchmark takes and gives. Plain values: importing it loads neither torch nor transformers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oval_core.config import TierConfig

MATCH = "match"
"""A link as fast as computing is: what prefetching can hide at most."""

ORDERS = ("none", "recent", "layer", "oracle")
"""In the order in which a table shows them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchSettings:
    """What to measure.

    Attributes:
        contexts: tokens in the cache after the last decode step.
        fast: sizes of fast memory: percentages of the context (`25%`) or token counts (`2048`).
        orders: what is fetched ahead; see `TierConfig.prefetch`.
        link_gbps: bandwidth of a modelled link; `match` makes the transfers of a step take as long as its
            computation; None is no model.
        link_latency_us: microseconds a transfer, in the modelled link.
        disk: folder of the page file; None keeps what is not in fast memory in main memory.
        direct_io: see `TierConfig`.
        host_tokens: see `TierConfig`.
        steps: timed decode steps.
        warmup: decode steps before them, not timed.
        chunk: tokens a forward of the prefill.
        threads: torch threads while decoding; None leaves one core to the worker that moves pages.
        rounds: times that each run is made; a row shows the one with the median time.
    """

    contexts: tuple[int, ...] = (8192,)
    fast: tuple[str, ...] = ("25%",)
    orders: tuple[str, ...] = ORDERS
    link_gbps: float | str | None = None
    link_latency_us: float = 0.0
    disk: str | None = None
    direct_io: bool = False
    host_tokens: int | None = None
    steps: int = 64
    warmup: int = 2
    chunk: int = 512
    threads: int | None = None
    rounds: int = 1

    def __post_init__(self) -> None:
        from oval_core.errors import ConfigError, did_you_mean  # here: oval_core imports torch

        lowest = {"steps": 1, "warmup": 0, "chunk": 1, "threads": 1, "rounds": 1}
        for name, low in lowest.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(
                    f"{name}: got {value}. Allowed: {low} or more. Choose such a value."
                )
        if isinstance(self.link_gbps, str) and self.link_gbps != MATCH:
            raise ConfigError(
                f"link_gbps: got {self.link_gbps!r}. Allowed: GB/s above 0, or {MATCH}. Choose one of these."
            )
        for order in self.orders:
            if order not in ORDERS:
                raise ConfigError(f"order: got {order!r}; {did_you_mean(order, ORDERS)}")
        decode = self.warmup + self.steps
        if min(self.contexts, default=0) <= decode:
            raise ConfigError(
                f"context: got {min(self.contexts, default=0)}. Allowed: more than {decode}, the steps and the "
                "warm-up. Ask for more tokens or fewer steps."
            )
        for context in self.contexts:
            for fast in self.fast:
                self.tiers(context, fast)

    def prompt_tokens(self, context: int) -> int:
        """Returns how many tokens are prefilled, so that the last step fills the context."""
        return context - self.warmup - self.steps

    def tiers(self, context: int, fast: str) -> TierConfig:
        """Returns the tiers of one size of fast memory, without prefetch; `match` is left open.

        Raises:
            ConfigError: one of the values is wrong.
        """
        from oval_core.config import TierConfig

        return TierConfig(
            fast_tokens=fast_tokens(fast, context),
            host_tokens=self.host_tokens,
            disk=self.disk,
            direct_io=self.direct_io,
            prefetch="none",
            link_gbps=None if isinstance(self.link_gbps, str) else self.link_gbps,
            link_latency_us=self.link_latency_us,
        )


def fast_tokens(text: str, context: int) -> int:
    """Returns a size of fast memory in tokens.

    Args:
        text: a percentage of the context (`25%`), or a token count (`2048`).
        context: tokens.
    Raises:
        ConfigError: neither of them, or not in 1..context.
    """
    from oval_core.errors import ConfigError

    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else None
        tokens = int(text) if share is None else math.floor(share * context)
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"fast: got {text!r}. Allowed: percentages of the context or token counts, with commas, such as "
            "12.5%,2048. Give these."
        ) from error
    if not 1 <= tokens <= context:
        raise ConfigError(
            f"fast: got {text}, {tokens} tokens. Allowed: 1..{context}, the context. Choose among these."
        )
    return tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchRow:
    """One order at one context and one size of fast memory. Seconds and bytes are those of all timed steps.

    Attributes:
        order: what is fetched ahead.
        fast_fraction: fast_tokens / context.
        link: `modelled link` where transfers were slowed down on purpose, else `real`.
        link_gbps: GB/s of the modelled link; None where bandwidth was not modelled.
        total_s: the steps of this run.
        compute_s: the steps of order `none` less the waiting: the same work, with nothing overlapped.
        resident_s: the steps with everything in fast memory.
        transfer_s: the worker's time on transfers.
        stall_s: what layers waited.
        bytes_prefetched: see `TierCounters`, as the other bytes.
        bytes_waiting_growth: what waited in fast memory after the steps less what waited before them; bytes_prefetched =
            bytes_used + bytes_wasted + bytes_waiting_growth.
        lead_ms: mean time from the end of a prefetch to its use.
        identical: whether the tokens are those of the run with everything in fast memory.
        ratio: total_s / max(compute_s, transfer_s); 1 is a perfect overlap.
        peak_mb: growth of the process's memory in the run; main memory holds the slow pages too, unless they are
            on a disk.
    """

    context: int
    order: str
    fast_fraction: float
    fast_tokens: int
    link: str
    link_gbps: float | None
    total_s: float
    compute_s: float
    resident_s: float
    transfer_s: float
    stall_s: float
    bytes_prefetched: int
    bytes_used: int
    bytes_late: int
    bytes_wasted: int
    bytes_waiting_growth: int
    bytes_demanded: int
    lead_ms: float
    identical: bool
    ratio: float
    peak_mb: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchReport:
    """Rows, and all that is needed to read them; `link` is that of all rows."""

    rows: tuple[PrefetchRow, ...]
    model: str
    dtype: str
    device: str
    threads: int
    backend: str
    linears: str
    steps: int
    warmup: int
    rounds: int
    chunk: int
    disk: str | None
    direct_io: bool
    host_tokens: int | None
    link: str
    link_latency_us: float
    versions: dict[str, str]
    machine: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, ready for JSON."""
        return asdict(self)
