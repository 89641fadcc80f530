"""What a decode benchmark takes and gives. Plain values: importing it loads neither torch nor transformers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oval_core.config import TierConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeSettings:
    """What to measure.

    Attributes:
        contexts: tokens in the cache before the first decode step.
        steps: timed decode steps a round.
        warmup: decode steps before them, not timed.
        rounds: times that Hugging Face and OVAL each take their turn.
        chunk: tokens a forward of the prefill.
        backend: OVAL's attention backend.
        linears: how OVAL runs linear layers for a few tokens; see `OvalConfig`.
        seed: seed of the prompt's token ids.
        tiers: of OVAL's side; None keeps everything in fast memory.
    """

    contexts: tuple[int, ...] = (1024, 4096, 8192)
    steps: int = 16
    warmup: int = 3
    rounds: int = 3
    chunk: int = 512
    backend: str = "auto"
    linears: str = "auto"
    seed: int = 0
    tiers: TierConfig | None = None

    def __post_init__(self) -> None:
        from oval_core.errors import ConfigError  # here: oval_core imports torch

        lowest = dict.fromkeys(("steps", "rounds", "chunk"), 1) | {"warmup": 0}
        values = [("context", min(self.contexts, default=0), 1)]
        values += [(name, getattr(self, name), low) for name, low in lowest.items()]
        for name, value, low in values:
            if value < low:
                raise ConfigError(
                    f"{name}: got {value}. Allowed: {low} or more. Choose such a value."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One side's turn at one context: prefill, then decode steps.

    Attributes:
        prefill_s: seconds of the prefill.
        step_ms: milliseconds of each timed step.
        kv_bytes: bytes of the tokens' keys and values for Hugging Face; bytes set aside for OVAL.
        peak_mb: growth of memory at its peak, cache and activations.
        first_logits: logits [V] after the prefill, as a float32 CPU tensor.
    """

    prefill_s: float
    step_ms: tuple[float, ...]
    kv_bytes: int
    peak_mb: float
    first_logits: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRow:
    """Hugging Face and OVAL at one context.

    Attributes:
        context: the context that was asked for.
        prompt_tokens: tokens prefilled; fewer than `context` where the decode steps would otherwise
            pass the model's last position.
        ratio: oval_ms_p50 / hf_ms_p50; below 1 OVAL is faster.
        kv_bytes: tokens x bytes a token, summed over Hugging Face's tensors.
        oval_kv_bytes_allocated: bytes that OVAL set aside for the same tokens.
        hf_rss_mb: peak growth of memory in its turn (on CUDA: of torch's allocator), largest of the rounds.
        max_logit_diff: largest difference of the logits after the prefill: both computed the same.
    """

    context: int
    prompt_tokens: int
    hf_ms_p50: float
    hf_ms_p99: float
    oval_ms_p50: float
    oval_ms_p99: float
    ratio: float
    hf_prefill_s: float
    oval_prefill_s: float
    kv_bytes: int
    oval_kv_bytes_allocated: int
    hf_rss_mb: float
    oval_rss_mb: float
    max_logit_diff: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeReport:
    """Rows, and all that is needed to read them.

    Attributes:
        tiers: settings of OVAL's tiers, `link` says whether transfers took real time; None without tiers.
    """

    rows: tuple[DecodeRow, ...]
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
    tiers: dict[str, Any] | None
    versions: dict[str, str]
    machine: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, ready for JSON."""
        return asdict(self)
