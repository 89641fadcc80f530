"""What `oval bench router` takes and gives. Plain values: importing it loads neither torch nor transformers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from oval_core.config import RoutingConfig, check_int

_LOWEST = {"pages": 1, "batch": 1, "rounds": 10, "page_size": 1, "layer_groups": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterCostSettings:
    """What to measure.

    Attributes:
        router: a folder or a name; None for the router that ships for the model, or else new weights.
        pages: of each sequence.
        batch: sequences, scored one after the other as a cache does.
        rounds: timed ones.
        page_size: tokens a page.
        layer_groups: selections a forward.
        budget: share of the text that is chosen.
        seed: of contents and of new weights.
    """

    router: str | None = None
    pages: int = 256
    batch: int = 1
    rounds: int = 200
    page_size: int = 16
    layer_groups: int = 3
    budget: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in _LOWEST.items():
            check_int(name, getattr(self, name), low, None)
        RoutingConfig(budget_share=self.budget)


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterCostReport:
    """Cost of choosing pages once for all layers, on one thread. Milliseconds are those of all sequences of a batch.

    Attributes:
        router: its name.
        is_trained: False for new weights, which cost the same.
        p50_ms: median of the whole: key signals, scores, choice.
        p99_ms: its 99th percentile, as `*_p99_ms` below.
        signals_p50_ms: key summaries against the last query, and the co-occurrence graph.
        score_p50_ms: the router alone.
        choose_p50_ms: the best pages within the budget.
        router_flops: matrix products of the router for one sequence.
        signal_flops: those of the key signals.
        decoder_flops: of one token at this context: two a weight, embeddings and head left out, and attention.
        flops_ratio: router and signals over the decoder.
        router_parameters: weights of the router.
    """

    router: str
    is_trained: bool
    p50_ms: float
    p99_ms: float
    signals_p50_ms: float
    signals_p99_ms: float
    score_p50_ms: float
    score_p99_ms: float
    choose_p50_ms: float
    choose_p99_ms: float
    router_flops: int
    signal_flops: int
    decoder_flops: int
    flops_ratio: float
    router_parameters: int
    context: int
    model: str
    dtype: str
    threads: int
    settings: RouterCostSettings
    versions: dict[str, str]
    machine: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, ready for JSON."""
        return asdict(self)
