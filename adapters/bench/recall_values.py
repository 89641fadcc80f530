"""What `oval bench recall` takes and gives. Plain values: importing it loads neither torch nor transformers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from oval_core.config import RoutingConfig, check_int
from oval_core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from oval_core.routing.replay import ReplayOptions

KINDS = ("text", "retrieval", "chat")
MEAN = "mean"
"""Stands for a kind: the mean of all kinds."""

ALL = "all"
AUTO = "auto"
"""Stands for a router: all that need no training, and the one that ships for the model."""

FLAVOURS = ("single", "later")
DEPTHS = (0.1, 0.5, 0.9)
LOOPS = ("closed", "open")
COVERAGE = 0.99
"""Of the policy `guarded`."""

AUDIT_EVERY = 16
"""Forwards from one that reads all keys, to measure what a selection covers, to the next."""

_LOWEST = {"context": 1, "steps": 2, "passages": 1, "passkeys": 0, "page_size": 1, "chunk": 1}

Interval = tuple[float, float]
"""95 %, by bootstrap over passages; None in its place where a kind has but one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecallSettings:
    """What to measure.

    Attributes:
        data: files with texts, see `oval_adapters.texts.passages`.
        context: tokens of a prompt.
        steps: tokens that follow it.
        passages: of each kind.
        kinds: sorts of passages.
        budgets: shares of the text that a layer reads.
        leads: steps for which a selection stands.
        routers: names, folders with trained routers, `auto` (what routing takes by default), or `all`.
        loops: what a replayed router sees: `closed`: what it read; `open`: everything.
        replays: whether signals are replayed on recorded attention.
        decode: whether models also decode with the routers.
        decode_leads: as `leads`, for decoding.
        passkey_contexts: tokens of prompts with passkeys.
        passkeys: cases of each flavour and length; 0 for none.
        seed: of passages and intervals.
        page_size: tokens a page.
        dense_layers: layers that read everything.
        layer_groups: selections a forward.
        num_sink_tokens: first tokens that are always read.
        window_size: last tokens that are always read.
        second_look: share of the budget that a layer's own query spends, while decoding, whatever the router.
        chunk: tokens a forward of the prefill.
    """

    data: tuple[str, ...]
    context: int = 4096
    steps: int = 192
    passages: int = 2
    kinds: tuple[str, ...] = KINDS
    budgets: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4)
    leads: tuple[int, ...] = (1, 4, 16)
    routers: tuple[str, ...] = (ALL,)
    loops: tuple[str, ...] = ("closed",)
    replays: bool = True
    decode: bool = True
    decode_leads: tuple[int, ...] = (1,)
    passkey_contexts: tuple[int, ...] = (1024, 2048)
    passkeys: int = 6
    seed: int = 0
    page_size: int = 16
    dense_layers: tuple[int, ...] = (0, 1)
    layer_groups: int = 3
    num_sink_tokens: int = 16
    window_size: int = 64
    second_look: float = 0.25
    chunk: int = 512

    def __post_init__(self) -> None:
        for name, low in _LOWEST.items():
            check_int(name, getattr(self, name), low, None)
        for name, allowed in (("kinds", KINDS), ("loops", LOOPS)):
            for value in getattr(self, name):
                if value not in allowed:
                    raise ConfigError(f"{name}: got {value!r}; {did_you_mean(value, allowed)}")
        for name in ("data", "kinds", "budgets", "leads", "decode_leads", "routers", "loops"):
            if not getattr(self, name):
                raise ConfigError(f"{name}: got none. Allowed: one or more. Give some.")
        if self.passages < len(self.data):
            raise ConfigError(
                f"passages: got {self.passages} of each kind for {len(self.data)} files. Allowed: {len(self.data)} or "
                "more, so that each is used. Ask for more, or give fewer files."
            )
        for lead in (*self.leads, *self.decode_leads):
            check_int("lead", lead, 1, self.steps)
        for context in self.passkey_contexts:
            check_int("passkey_contexts", context, 1, None)
        for budget in self.budgets:
            for lead in (*self.leads, *self.decode_leads):
                self.routing(budget, lead)

    def routing(self, budget: float, lead: int = 1, router: str = "freekv") -> RoutingConfig:
        """Returns the settings that a model decodes with.

        Raises:
            ConfigError: one of the values is wrong.
        """
        return RoutingConfig(
            router=router,
            budget_share=budget,
            coverage=COVERAGE,
            num_sink_tokens=self.num_sink_tokens,
            window_size=self.window_size,
            second_look=self.second_look,
            dense_layers=self.dense_layers,
            layer_groups=self.layer_groups,
            lead=lead,
            audit_every=AUDIT_EVERY,
        )

    def replay(self, budget: float, lead: int, loop: str) -> ReplayOptions:
        """Returns the same rules for a replay."""
        from oval_core.routing.replay import ReplayOptions  # here: it imports torch

        return ReplayOptions(
            budget=budget,
            lead=lead,
            num_sink_tokens=self.num_sink_tokens,
            window_size=self.window_size,
            loop="open" if loop == "open" else "closed",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RecallRow:
    """One router at one lead and budget on the recorded passages of a kind; means over them.

    Attributes:
        signal: the router.
        lead: steps for which a selection stands; 0 for a router that needs the layer's own query, at every step.
        loop: what it saw.
        mass_recall: see `oval_core.routing.recall`, as what follows down to `new_bytes_per_token`.
        heavy_page_recall: None where no page is heavy.
        output_error: None where no step was sampled.
        selector_ms: median time to score the pages of one sequence, key signals included; the same for all kinds.
        passages: how many.
        mass_recall_interval: of the mean.
        output_error_interval: of the mean.
        mass_recall_by_passage: one value a passage.
        output_error_by_passage: one value a passage.
    """

    signal: str
    kind: str
    lead: int
    budget: float
    loop: str
    mass_recall: float
    mass_recall_p10: float
    mass_recall_excluding_kept: float
    page_recall: float
    heavy_page_recall: float | None
    output_error: float | None
    miss_bytes_per_token: float
    new_bytes_per_token: float
    selector_ms: float
    passages: int
    mass_recall_interval: Interval | None
    output_error_interval: Interval | None
    mass_recall_by_passage: tuple[float, ...]
    output_error_by_passage: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopRow:
    """One policy and router that a model decoded the passages of a kind with, the text forced on it.

    Attributes:
        signal: the router; `full` for none.
        policy: `full`, `routed` or `guarded`.
        lead: as in `RecallRow`.
        perplexity: of the tokens after the first step's.
        perplexity_ratio: over that of full attention, same tokens, same prefill.
        read_share: keys that routed layers read, repairs included, over those that there are.
        summary_share: bytes of key summaries that were scored over those of the keys and values that there are.
        tokens_read_per_step: keys that a routed layer reads of a sequence.
        mass_recall: share of the true attention mass that they had, at each 16th forward; None where there was none.
        ms_per_token: median time of a forward of all passages at once.
        passages: how many.
        perplexity_ratio_interval: of the ratio.
        log_perplexity_by_passage: mean negative log likelihood of each passage.
    """

    signal: str
    policy: str
    kind: str
    lead: int
    budget: float
    perplexity: float
    perplexity_ratio: float
    read_share: float
    summary_share: float
    tokens_read_per_step: float | None
    mass_recall: float | None
    ms_per_token: float
    passages: int
    perplexity_ratio_interval: Interval | None
    log_perplexity_by_passage: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PasskeyRow:
    """One policy and router that a model answered questions with, about codes in a text.

    Attributes:
        flavour: `single`: asked at the end of the prompt; `later`: in a later turn.
        context: tokens of the prompt.
        correct: answers that are right.
        cases: how many were asked.
        full_correct: answers that are right under full attention.
        correct_where_full_is: of those, right here too.
    """

    signal: str
    policy: str
    flavour: str
    context: int
    lead: int
    budget: float
    correct: int
    cases: int
    full_correct: int
    correct_where_full_is: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RecallReport:
    """Rows of all three sorts, and all that is needed to read them."""

    rows: tuple[RecallRow, ...]
    decode: tuple[LoopRow, ...]
    passkeys: tuple[PasskeyRow, ...]
    model: str
    dtype: str
    device: str
    threads: int
    backend: str
    settings: RecallSettings
    versions: dict[str, str]
    machine: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, ready for JSON."""
        return asdict(self)


def parse_shares(name: str, text: str) -> tuple[float, ...]:
    """Returns the shares of a list with commas: percentages (`5%`), or numbers above 0 and up to 1.

    Raises:
        ConfigError: one is neither.
    """
    found = []
    for part in text.split(","):
        try:
            share = float(part[:-1]) / 100 if part.endswith("%") else float(part)
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise ConfigError(
                f"{name}: got {part!r}. Allowed: percentages above 0% and up to 100%, with commas, such as 5%,10%. "
                "Give these."
            )
        found.append(share)
    return tuple(found)
