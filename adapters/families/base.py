"""What OVAL must know about a decoder beyond what its attention call says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oval_core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _never(config: PretrainedConfig) -> int | None:
    return None


def _no_windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    return (None,) * config.num_hidden_layers


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Facts of one `model_type`.

    Attributes:
        model_type: as in the config.
        windows: gives each layer's sliding window in tokens (the query's own included), None for all.
        drops_cache_above: gives the length of text from which on the model's `generate` throws a cache away.
        known_layer_types: values of `config.layer_types` whose masks OVAL reproduces.
    """

    model_type: str
    windows: Callable[[PretrainedConfig], tuple[int | None, ...]] = _no_windows
    drops_cache_above: Callable[[PretrainedConfig], int | None] = _never
    known_layer_types: tuple[str, ...] = ("full_attention", "sliding_attention")

    def check(self, config: PretrainedConfig) -> None:
        """Raises `UnsupportedModelError` where the config asks for what OVAL cannot run exactly."""
        if getattr(config, "use_bidirectional_attention", False) or not getattr(
            config, "is_causal", True
        ):
            raise UnsupportedModelError(
                f"{self.model_type}: got bidirectional attention. Allowed: causal decoders. "
                "Run this model without OVAL."
            )
        unknown = set(getattr(config, "layer_types", None) or ()) - set(self.known_layer_types)
        if unknown:
            raise UnsupportedModelError(
                f"{self.model_type}: got layer types {sorted(unknown)}. "
                f"Allowed: {', '.join(self.known_layer_types)}. Run this model without OVAL."
            )


def windows_by_layer_type(config: PretrainedConfig) -> tuple[int | None, ...]:
    """Windows of models that name each layer `full_attention` or `sliding_attention`."""
    return tuple(
        config.sliding_window if kind == "sliding_attention" else None
        for kind in config.layer_types
    )


def one_window(config: PretrainedConfig) -> tuple[int | None, ...]:
    """Windows of models whose layers all use `config.sliding_window`, which may be None."""
    return (config.sliding_window,) * config.num_hidden_layers
