"""The one place where a default lives. Knows nothing of files or models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from oval_core.config_section import check_keys, read_section
from oval_core.errors import ConfigError, did_you_mean
from oval_core.speculation_config import SpeculationConfig
from oval_core.vision_config import VisionConfig

MIN_PAGE_SIZE = 1
MAX_PAGE_SIZE = 32
POLICY_NAMES = ("full", "guarded", "routed")
BACKEND_NAMES = ("auto", "native", "reference", "sdpa", "torch")
LINEARS_NAMES = ("auto", "gemv", "hf", "native")
PREFETCH_NAMES = ("layer", "none", "oracle", "recent")
SIZING_NAMES = ("attention_entropy", "dynamic", "fixed", "key_similarity")


@dataclass(frozen=True, kw_only=True, slots=True)
class TierConfig:
    """How much K and V stay in fast memory, and where the rest goes.

    Attributes:
        fast_tokens: tokens whose K and V fit in fast memory, buffers for transfers included.
        host_tokens: tokens that main memory holds beside them; the oldest go on to `disk`. None is no limit
            without a disk, and nothing (all goes to the disk) with one.
        disk: folder of the page file, one for each cache, removed with it; None for no disk.
        direct_io: whether file reads and writes go past the page cache of the operating system.
        prefetch: what is fetched before it is asked for. `oracle`: everything, in the order in which the layers
            will read it; `layer`: the next layer while one runs; `recent`: of each layer the newest pages only;
            `none`: nothing.
        dense_layers: decoder layers that stay in fast memory whole, beside `fast_tokens`.
        sink_tokens: first tokens of a sequence that leave fast memory last.
        recent_tokens: last tokens of a sequence that leave fast memory last.
        link_gbps: slows transfers down to this many GB/s (1e9 bytes), to model a link; None for as fast as it goes.
        link_latency_us: microseconds that each transfer takes besides, in the modelled link.
    """

    fast_tokens: int = 2048
    host_tokens: int | None = None
    disk: str | None = None
    direct_io: bool = False
    prefetch: str = "oracle"
    dense_layers: tuple[int, ...] = ()
    sink_tokens: int = 16
    recent_tokens: int = 64
    link_gbps: float | None = None
    link_latency_us: float = 0.0

    def __post_init__(self) -> None:
        check_int("tiers.fast_tokens", self.fast_tokens, 1, None)
        check_int("tiers.sink_tokens", self.sink_tokens, 0, None)
        check_int("tiers.recent_tokens", self.recent_tokens, 0, None)
        _check_name("tiers.prefetch", self.prefetch, PREFETCH_NAMES)
        _check_bool("tiers.direct_io", self.direct_io)
        if self.host_tokens is not None:
            check_int("tiers.host_tokens", self.host_tokens, 0, None)
        if self.disk is not None and not (isinstance(self.disk, str) and self.disk):
            raise ConfigError(
                f"tiers.disk: got {self.disk!r}. Allowed: a folder, or null. Name one."
            )
        if self.disk is None and self.host_tokens is not None:
            raise ConfigError(
                f"tiers.host_tokens: got {self.host_tokens} without a disk. Allowed: a limit only with "
                "tiers.disk, where the rest goes. Name a folder, or leave the limit out."
            )
        if self.disk is None and self.direct_io:
            raise ConfigError(
                "tiers.direct_io: got true without a disk. Allowed: with tiers.disk. Name a folder."
            )
        layers = _check_layers("tiers.dense_layers", self.dense_layers)
        object.__setattr__(self, "dense_layers", layers)
        if self.link_gbps is not None:
            _check_number("tiers.link_gbps", self.link_gbps, 1e-6)
        _check_number("tiers.link_latency_us", self.link_latency_us, 0.0)

    @property
    def is_modelled_link(self) -> bool:
        """Whether transfers are slowed down on purpose: every figure made so must say it."""
        return self.link_gbps is not None or self.link_latency_us > 0

    @classmethod
    def from_dict(cls, values: object) -> TierConfig:
        """Builds the settings from plain values; an unknown key raises `ConfigError`."""
        return read_section(cls, "tiers", "fast_tokens: 2048", values)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingConfig:
    """What the policies `routed` and `guarded` read. Both are lossy below a budget of the whole text.

    Attributes:
        router: what scores pages: a name of `oval_core.routing.registry.ROUTER_NAMES`, or a folder with a trained router;
            `auto` takes the trained router that ships for this model, or else `sketch`.
        token_budget: tokens that a layer reads of a sequence, always-kept ones included; these are read even where
            they alone are more.
        budget_share: in place of `token_budget`: this share of the sequence, above 0 and up to 1; None for tokens.
        coverage: under `guarded`, the attention mass that pages must be estimated to hold before a layer goes on.
        num_sink_tokens: first tokens of a sequence that are always read.
        window_size: last tokens of a sequence that are always read; uncommitted ones are, besides.
        second_look: share of the budget that each layer's own query spends, by page sketches, when the layer runs; the
            router spends the rest ahead. 0 leaves all of it to the router. Routers that wait for the query anyway
            spend everything then.
        dense_layers: decoder layers that read everything.
        layer_groups: selections a forward: neighbouring layers share one.
        lead: forwards for which a selection stands before the next is made.
        max_queries: forwards with more new tokens a row read everything: a prompt, a new turn.
        audit_every: measure the attention mass that selections miss at each so-many-th forward, by reading all keys;
            None for never.
        sizing: where text pages end: `fixed` (all of `page_size`), or by the prompt: `dynamic`, `key_similarity`,
            `attention_entropy`.
    """

    router: str = "auto"
    token_budget: int = 1024
    budget_share: float | None = None
    coverage: float = 0.99
    num_sink_tokens: int = 16
    window_size: int = 64
    second_look: float = 0.25
    dense_layers: tuple[int, ...] = (0, 1)
    layer_groups: int = 3
    lead: int = 1
    max_queries: int = 16
    audit_every: int | None = None
    sizing: str = "fixed"

    def __post_init__(self) -> None:
        if not (isinstance(self.router, str) and self.router):
            raise ConfigError(
                f"routing.router: got {self.router!r}. Allowed: a router's name, or a folder. Name one."
            )
        check_int("routing.token_budget", self.token_budget, 1, None)
        if self.budget_share is not None:
            _check_share("routing.budget_share", self.budget_share)
        _check_share("routing.coverage", self.coverage)
        check_int("routing.num_sink_tokens", self.num_sink_tokens, 0, None)
        check_int("routing.window_size", self.window_size, 1, None)
        if self.second_look != 0:
            _check_share("routing.second_look", self.second_look)
        check_int("routing.layer_groups", self.layer_groups, 1, None)
        check_int("routing.lead", self.lead, 1, None)
        check_int("routing.max_queries", self.max_queries, 1, None)
        if self.audit_every is not None:
            check_int("routing.audit_every", self.audit_every, 1, None)
        _check_name("routing.sizing", self.sizing, SIZING_NAMES)
        layers = _check_layers("routing.dense_layers", self.dense_layers)
        object.__setattr__(self, "dense_layers", layers)

    def budget(self, length: int) -> int:
        """Returns how many tokens of a sequence of this length a layer reads."""
        if self.budget_share is None:
            return self.token_budget
        return math.ceil(self.budget_share * length)

    @classmethod
    def from_dict(cls, values: object) -> RoutingConfig:
        """Builds the settings from plain values; an unknown key raises `ConfigError`."""
        return read_section(cls, "routing", "token_budget: 1024", values)


@dataclass(frozen=True, kw_only=True, slots=True)
class OvalConfig:
    """Settings of a paged cache.

    Attributes:
        page_size: tokens in a sealed text page, 1..32.
        policy: which pages a query reads. `full` reads all of them and equals dense attention. `routed` reads those
            that a router chose, within a budget. `guarded` also fetches, layer by layer, what the true query is
            estimated to miss. The last two are lossy.
        backend: attention backend; `auto` takes `native` for bf16 on a CPU with a C compiler, `torch` on other
            CPUs and `sdpa` elsewhere.
        linears: how linear layers run for a few tokens: for bf16 on a CPU `auto` takes `native` (C) or, without
            a compiler, `gemv` (torch.mv), both of the same precision; elsewhere `hf`, the model's own.
        reserve_tokens: slots set aside per sequence at the first forward; None takes the length that
            `generate` was asked for, and grows by need in direct forward calls.
        track_hidden: also keep each token's last hidden state, for page summaries (hidden mean).
        tiers: how much stays in fast memory and where the rest goes (a `TierConfig`, or a mapping of its values);
            None keeps everything.
        routing: what `routed` and `guarded` read (a `RoutingConfig`, or a mapping of its values); None takes its
            defaults with these policies.
        speculation: how `oval.speculative` drafts and verifies (a `SpeculationConfig`, or a mapping of its values); None
            takes its defaults where a call speculates.
        vision: how images are kept (a `VisionConfig`, or a mapping of its values), for models that see them; None takes
            its defaults.
    """

    page_size: int = 16
    policy: str = "full"
    backend: str = "auto"
    linears: str = "auto"
    reserve_tokens: int | None = None
    track_hidden: bool = False
    tiers: TierConfig | None = None
    routing: RoutingConfig | None = None
    speculation: SpeculationConfig | None = None
    vision: VisionConfig | None = None

    def __post_init__(self) -> None:
        check_int("page_size", self.page_size, MIN_PAGE_SIZE, MAX_PAGE_SIZE)
        _check_name("policy", self.policy, POLICY_NAMES)
        _check_name("backend", self.backend, BACKEND_NAMES)
        _check_name("linears", self.linears, LINEARS_NAMES)
        if self.reserve_tokens is not None:
            check_int("reserve_tokens", self.reserve_tokens, 1, None)
        _check_bool("track_hidden", self.track_hidden)
        if self.tiers is not None:
            object.__setattr__(self, "tiers", TierConfig.from_dict(self.tiers))
        if self.routing is not None:
            object.__setattr__(self, "routing", RoutingConfig.from_dict(self.routing))
            if self.policy == "full":
                raise ConfigError(
                    "routing: got settings with policy 'full', which reads everything. Allowed: with policy 'routed' "
                    "or 'guarded'. Choose one of them, or leave routing out."
                )
        elif self.policy != "full":
            object.__setattr__(self, "routing", RoutingConfig())
        if self.speculation is not None:
            known = SpeculationConfig.from_dict(self.speculation)
            object.__setattr__(self, "speculation", known)
        if self.vision is not None:
            object.__setattr__(self, "vision", VisionConfig.from_dict(self.vision))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OvalConfig:
        """Builds a config from plain values; an unknown key raises `ConfigError`."""
        check_keys(values, cls, "")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plain values; `from_dict(to_dict())` gives an equal config."""
        return asdict(self)


def check_int(name: str, value: object, low: int, high: int | None) -> None:
    """Raises `ConfigError` unless value is a whole number in low..high."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(
            f"{name}: got {value!r} ({type(value).__name__}). Allowed: a whole number. Give one."
        )
    if value < low or (high is not None and value > high):
        allowed = f"{low}..{high}" if high is not None else f"{low} or more"
        raise ConfigError(f"{name}: got {value}. Allowed: {allowed}. Choose a value in that range.")


def _check_name(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}: got {value!r}; {did_you_mean(str(value), allowed)}")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: got {value!r}. Allowed: true or false. Set one of them.")


def _check_number(name: str, value: object, low: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (low <= float(cast("float", value)) < math.inf):
        raise ConfigError(f"{name}: got {value!r}. Allowed: a number from {low:g} on. Give one.")


def _check_share(name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < float(cast("float", value)) <= 1:
        raise ConfigError(f"{name}: got {value!r}. Allowed: above 0, up to 1. Give such a share.")


def _check_layers(name: str, layers: object) -> tuple[int, ...]:
    if not isinstance(layers, list | tuple):
        raise ConfigError(
            f"{name}: got {layers!r}. Allowed: a list of layer numbers. Give such a list."
        )
    for layer in layers:
        check_int(name, layer, 0, None)
    return tuple(sorted(set(layers)))
