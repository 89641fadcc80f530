"""The one place where a default lives. Knows nothing of files or models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

from oval_core.errors import ConfigError, did_you_mean

MIN_PAGE_SIZE = 1
MAX_PAGE_SIZE = 32
POLICY_NAMES = ("full",)
BACKEND_NAMES = ("auto", "native", "reference", "sdpa", "torch")
LINEARS_NAMES = ("auto", "gemv", "hf", "native")
PREFETCH_NAMES = ("layer", "none", "oracle", "recent")


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
        object.__setattr__(self, "dense_layers", _check_layers(self.dense_layers))
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
        if isinstance(values, TierConfig):
            return values
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"tiers: got {values!r}. Allowed: null, or settings such as {{fast_tokens: 2048}}. Give these."
            )
        _check_keys(values, cls, "tiers.")
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class OvalConfig:
    """Settings of a paged cache.

    Attributes:
        page_size: tokens in a sealed text page, 1..32.
        policy: which pages a query reads. `full` reads all of them and equals dense attention.
        backend: attention backend; `auto` takes `native` for bf16 on a CPU with a C compiler, `torch` on other
            CPUs and `sdpa` elsewhere.
        linears: how linear layers run for a single token: for bf16 on a CPU `auto` takes `native` (C) or, without
            a compiler, `gemv` (torch.mv), both of the same precision; elsewhere `hf`, the model's own.
        reserve_tokens: slots set aside per sequence at the first forward; None takes the length that
            `generate` was asked for, and grows by need in direct forward calls.
        track_hidden: also keep each token's last hidden state, for page summaries (hidden mean).
        tiers: how much stays in fast memory and where the rest goes (a `TierConfig`, or a mapping of its values);
            None keeps everything.
    """

    page_size: int = 16
    policy: str = "full"
    backend: str = "auto"
    linears: str = "auto"
    reserve_tokens: int | None = None
    track_hidden: bool = False
    tiers: TierConfig | None = None

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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OvalConfig:
        """Builds a config from plain values; an unknown key raises `ConfigError`."""
        _check_keys(values, cls, "")
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


def _check_keys(values: Mapping[str, Any], cls: type, path: str) -> None:
    allowed = {field.name for field in fields(cls)}
    for key in values:
        if key not in allowed:
            shown = f"{path}{key}" if isinstance(key, str) else key
            raise ConfigError(f"unknown config key {shown!r}: {did_you_mean(str(key), allowed)}")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: got {value!r}. Allowed: true or false. Set one of them.")


def _check_number(name: str, value: object, low: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (low <= float(cast("float", value)) < math.inf):
        raise ConfigError(f"{name}: got {value!r}. Allowed: a number from {low:g} on. Give one.")


def _check_layers(layers: object) -> tuple[int, ...]:
    if not isinstance(layers, list | tuple):
        raise ConfigError(
            f"tiers.dense_layers: got {layers!r}. Allowed: a list of layer numbers. Give such a list."
        )
    for layer in layers:
        check_int("tiers.dense_layers", layer, 0, None)
    return tuple(sorted(set(layers)))
