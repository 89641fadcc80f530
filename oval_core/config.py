"""The one place where a default lives. Knows nothing of files or models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from oval_core.errors import ConfigError, did_you_mean

MIN_PAGE_SIZE = 1
MAX_PAGE_SIZE = 32
POLICY_NAMES = ("full",)
BACKEND_NAMES = ("auto", "native", "reference", "sdpa", "torch")
LINEARS_NAMES = ("auto", "gemv", "hf", "native")


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
    """

    page_size: int = 16
    policy: str = "full"
    backend: str = "auto"
    linears: str = "auto"
    reserve_tokens: int | None = None
    track_hidden: bool = False

    def __post_init__(self) -> None:
        check_int("page_size", self.page_size, MIN_PAGE_SIZE, MAX_PAGE_SIZE)
        _check_name("policy", self.policy, POLICY_NAMES)
        _check_name("backend", self.backend, BACKEND_NAMES)
        _check_name("linears", self.linears, LINEARS_NAMES)
        if self.reserve_tokens is not None:
            check_int("reserve_tokens", self.reserve_tokens, 1, None)
        if not isinstance(self.track_hidden, bool):
            raise ConfigError(
                f"track_hidden: got {self.track_hidden!r}. Allowed: true or false. Set one of them."
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OvalConfig:
        """Builds a config from plain values; an unknown key raises `ConfigError`."""
        allowed = {field.name for field in fields(cls)}
        for key in values:
            if key not in allowed:
                raise ConfigError(f"unknown config key {key!r}: {did_you_mean(str(key), allowed)}")
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
