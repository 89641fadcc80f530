"""What `oval bench self-draft` takes and gives. Plain values: importing it loads neither torch nor transformers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from oval_core.config import check_int
from oval_core.errors import ConfigError, did_you_mean
from oval_core.speculation_config import SELF_DRAFT_NAMES

KINDS = ("text", "retrieval", "chat")


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfDraftSettings:
    """What to measure.

    Attributes:
        data: files with texts, see `oval_adapters.texts.passages`.
        contexts: tokens of the prompts.
        kinds: sorts of passages.
        passages: of each kind, at each context.
        budgets: tokens that a layer reads of a sequence while drafting.
        policies: what drafts read.
        router: of routed drafts.
        depth: tokens of a chain.
        new_tokens: decoded after each prompt.
        chunk: tokens a forward of the prefill.
        seed: of passages and intervals.
    """

    data: tuple[str, ...]
    contexts: tuple[int, ...] = (2048, 4096, 8000)
    kinds: tuple[str, ...] = KINDS
    passages: int = 2
    budgets: tuple[int, ...] = (256,)
    policies: tuple[str, ...] = SELF_DRAFT_NAMES
    router: str = "auto"
    depth: int = 5
    new_tokens: int = 64
    chunk: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("passages", "depth", "new_tokens", "chunk"):
            check_int(name, getattr(self, name), 1, None)
        for name, allowed in (("kinds", KINDS), ("policies", SELF_DRAFT_NAMES)):
            for value in getattr(self, name):
                if value not in allowed:
                    raise ConfigError(f"{name}: got {value!r}; {did_you_mean(value, allowed)}")
        for name in ("data", "contexts", "kinds", "budgets", "policies"):
            if not getattr(self, name):
                raise ConfigError(f"{name}: got none. Allowed: one or more. Give some.")
        for budget in self.budgets:
            check_int("budgets", budget, 1, min(self.contexts))


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfDraftRow:
    """One policy at one context, budget and kind.

    Attributes:
        context: tokens of the prompts.
        kind: of passages.
        policy: what drafts read.
        budget: tokens of it.
        acceptance: accepted / drafted tokens.
        tau: tokens a forward of the target, the bonus included.
        accepted_by_position: share of the drafts whose first 1, 2, ... tokens were right, of those that reached so far.
        acceptance_by_passage: the same by passage.
        draft_ms: median of a whole draft.
        verify_ms: median of a verification.
        identical: whether every text is the one of plain decoding with all pages.
        drafted: tokens.
        accepted: tokens.
    """

    context: int
    kind: str
    policy: str
    budget: int
    acceptance: float
    tau: float
    accepted_by_position: tuple[float, ...]
    acceptance_by_passage: tuple[float, ...]
    draft_ms: float
    verify_ms: float
    identical: bool
    drafted: int
    accepted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfDraftGain:
    """Routed less window-only, over the passages of all kinds at one context and budget.

    Attributes:
        context: tokens of the prompts.
        budget: tokens that drafts read.
        gain: mean difference of the acceptance of a passage.
        interval: 95 % of it, by bootstrap over passages; None with one passage a kind.
        window_acceptance: of window-only.
        routed_acceptance: of routed.
    """

    context: int
    budget: int
    gain: float
    interval: tuple[float, float] | None
    window_acceptance: float
    routed_acceptance: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfDraftReport:
    """Rows, what they say of routed against window-only, and all that is needed to read them."""

    rows: tuple[SelfDraftRow, ...]
    gains: tuple[SelfDraftGain, ...]
    model: str
    dtype: str
    device: str
    threads: int
    settings: SelfDraftSettings
    versions: dict[str, str]
    machine: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, ready for JSON."""
        return asdict(self)
