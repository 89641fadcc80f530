"""What `oval bench fusion` takes and gives. Plain values: importing it loads neither torch nor transformers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from oval_core.config import RoutingConfig, TierConfig, check_int
from oval_core.errors import ConfigError, did_you_mean

DEMAND = "demand"
"""An order for comparison: nothing is fetched before a verification begins."""

ORDERS = (DEMAND, "none", "recency", "target", "draft", "union", "intersection")
"""In the order in which a table shows them; `none`: what the tiers do by themselves."""

POLICIES = ("full", "routed", "guarded")
DRAFTERS = ("self", "medusa")


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionSettings:
    """What to measure.

    Attributes:
        context: tokens of the prompt.
        fast: size of fast memory: a percentage of the context (`25%`) or a token count.
        link_gbps: bandwidth of the modelled link, GB/s.
        policies: what verifications read.
        orders: of fusion.
        drafter: `self` or `medusa`: whose drafts and states are replayed in every run.
        heads: of `medusa`; see `SpeculationConfig`.
        self_budget: tokens that `self` reads.
        budget_share: of the text, that a layer reads in verifications under `routed` and `guarded`.
        router: predicts pages on both sides, and chooses them; must read hidden states for a draft side.
        most_pages: pages that come back into the pool before a verification at most; None: see `PageFusion`.
        depth: tokens of a draft.
        new_tokens: decoded in each run.
        chunk: tokens a forward of the prefill.
        rounds: times that each order runs, in turn; a row shows the run with the median stall.
    """

    context: int = 4096
    fast: str = "25%"
    link_gbps: float = 1.0
    policies: tuple[str, ...] = ("full", "routed")
    orders: tuple[str, ...] = ORDERS
    drafter: str = "self"
    heads: str = "auto"
    self_budget: int = 256
    budget_share: float = 0.1
    router: str = "auto"
    most_pages: int | None = None
    depth: int = 4
    new_tokens: int = 48
    chunk: int = 256
    rounds: int = 1

    def __post_init__(self) -> None:
        for name in ("context", "self_budget", "depth", "new_tokens", "chunk", "rounds"):
            check_int(name, getattr(self, name), 1, None)
        if self.most_pages is not None:
            check_int("most_pages", self.most_pages, 0, None)
        chosen = {"policies": POLICIES, "orders": ORDERS}
        for name, allowed in chosen.items():
            if not getattr(self, name):
                raise ConfigError(f"{name}: got none. Allowed: {', '.join(allowed)}. Give some.")
            for value in getattr(self, name):
                if value not in allowed:
                    raise ConfigError(f"{name}: got {value!r}; {did_you_mean(value, allowed)}")
        if self.drafter not in DRAFTERS:
            raise ConfigError(
                f"drafter: got {self.drafter!r}; {did_you_mean(self.drafter, DRAFTERS)}"
            )
        self.tiers()
        self.routing()

    def tiers(self) -> TierConfig:
        """Returns the tiers.

        Raises:
            ConfigError: a value is wrong.
        """
        from oval_adapters.bench.prefetch_values import fast_tokens

        return TierConfig(
            fast_tokens=fast_tokens(self.fast, self.context), link_gbps=self.link_gbps
        )

    def routing(self) -> RoutingConfig:
        """Returns what `routed` and `guarded` read, and what is watched under `full`."""
        return RoutingConfig(router=self.router, budget_share=self.budget_share)


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionRow:
    """One order under one policy. Seconds and bytes are those of all steps.

    Attributes:
        policy: what verifications read.
        order: of fusion.
        steps: verifications.
        stall_ms: what layers waited in a verification, mean.
        promotion_ms: what bringing pages back into the pool took before a verification, mean of a step: not hidden.
        prepare_ms: what predicting and bringing pages back took, mean of a step.
        verify_ms: of a verification, mean.
        resident_share: pages that a verification was taken to read, and that were in the pool before it began.
        hit_rate: page reads of layers that found the page in fast memory.
        predicted: pages that the order named, mean of a step.
        common: of these, wanted by both sides.
        promoted: pages that came back into the pool, mean of a step.
        bytes_prefetched: see `TierCounters`, as the other bytes.
        bytes_loaded: of pages that came back into the pool.
        identical: whether the tokens are those of the run with everything in fast memory.
    """

    policy: str
    order: str
    steps: int
    stall_ms: float
    promotion_ms: float
    prepare_ms: float
    verify_ms: float
    resident_share: float
    hit_rate: float
    predicted: float
    common: float
    promoted: float
    bytes_prefetched: int
    bytes_used: int
    bytes_wasted: int
    bytes_late: int
    bytes_demanded: int
    bytes_loaded: int
    identical: bool

    @property
    def waiting_ms(self) -> float:
        """What a step waits for the link: stall and promotion."""
        return self.stall_ms + self.promotion_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionDrafts:
    """The drafts that every run of a policy replays.

    Attributes:
        policy: under which they were made, with everything in fast memory.
        drafter: who made them.
        steps: drafts.
        tau: tokens a verification, the bonus included.
        draft_ms: mean of a draft; replays wait as long.
        has_states: whether the draft side could predict pages.
        verify_ms: mean of a verification with everything in fast memory.
    """

    policy: str
    drafter: str
    steps: int
    tau: float
    draft_ms: float
    has_states: bool
    verify_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionReport:
    """Rows, and all that is needed to read them."""

    rows: tuple[FusionRow, ...]
    drafts: tuple[FusionDrafts, ...]
    findings: tuple[str, ...]
    model: str
    dtype: str
    device: str
    threads: int
    link: str
    settings: FusionSettings
    versions: dict[str, str]
    machine: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, ready for JSON."""
        return asdict(self)
