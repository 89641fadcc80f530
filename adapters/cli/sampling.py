"""How `oval generate` chooses tokens, and how many."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

_MAX_SEED = 2**63 - 1
_LEAST_TEMPERATURE = 1e-6
"""Scores over less would overflow, and nothing could be drawn."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen, and how many."""

    max_new_tokens: int
    temperature: float
    top_p: float | None
    seed: int | None
    prefill_chunk: int

    def check(self) -> None:
        """Raises `ConfigError` where a value is out of range."""
        from oval_core.errors import ConfigError

        seed_ok = self.seed is None or 0 <= self.seed <= _MAX_SEED
        warm = self.temperature == 0 or _LEAST_TEMPERATURE <= self.temperature < math.inf
        rules = (
            ("max-new-tokens", self.max_new_tokens, "1 or more", self.max_new_tokens >= 1),
            ("prefill-chunk", self.prefill_chunk, "1 or more", self.prefill_chunk >= 1),
            ("temperature", self.temperature, f"0, or {_LEAST_TEMPERATURE:g} and more", warm),
            ("top-p", self.top_p, "above 0, up to 1", self.top_p is None or 0 < self.top_p <= 1),
            ("seed", self.seed, f"0..{_MAX_SEED}", seed_ok),
        )
        for name, value, allowed, is_right in rules:
            if not is_right:
                raise ConfigError(
                    f"{name}: got {value}. Allowed: {allowed}. Choose a value in that range."
                )
        if self.seed is not None and self.temperature == 0:
            raise ConfigError(
                "seed: got it with temperature 0, which is greedy and draws nothing. Allowed: with --temperature "
                "above 0. Add --temperature, or leave --seed out."
            )
        if self.top_p is not None and self.temperature == 0:
            raise ConfigError(
                "top-p: got it with temperature 0, which is greedy. Allowed: with --temperature above 0. "
                "Add --temperature, or leave --top-p out."
            )

    def arguments(self, prompt_tokens: int) -> dict[str, Any]:
        """Returns the keyword arguments of `model.generate`."""
        chosen: dict[str, Any] = {"max_new_tokens": self.max_new_tokens}
        chosen["do_sample"] = self.temperature > 0
        if self.temperature > 0:
            chosen["temperature"] = self.temperature
        if self.top_p is not None:
            chosen["top_p"] = self.top_p
        if prompt_tokens > self.prefill_chunk:
            chosen["prefill_chunk_size"] = self.prefill_chunk
        return chosen
