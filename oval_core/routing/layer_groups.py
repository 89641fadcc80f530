"""Which decoder layers share a selection."""

from __future__ import annotations

from collections.abc import Sequence

from oval_core.config import RoutingConfig
from oval_core.errors import ConfigError


def layer_groups(config: RoutingConfig, windows: Sequence[int | None]) -> dict[int, int]:
    """Returns the group of each routed layer: neighbours share one, as evenly as they can.

    Raises:
        ConfigError: `dense_layers` names a layer that is not there, or no layer is left.
    """
    beyond = [layer for layer in config.dense_layers if layer >= len(windows)]
    layers = [
        i for i, window in enumerate(windows) if window is None and i not in config.dense_layers
    ]
    if beyond or not layers:
        raise ConfigError(
            f"routing.dense_layers: got {list(config.dense_layers)} for {len(windows)} decoder layers, of which "
            f"{sum(window is not None for window in windows)} have a sliding window and are never routed. Allowed: "
            f"some of 0..{len(windows) - 1}, so that a layer is left. Give fewer, or policy: full."
        )
    groups = min(config.layer_groups, len(layers))
    return {layer: place * groups // len(layers) for place, layer in enumerate(layers)}
