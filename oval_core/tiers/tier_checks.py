"""Checks the settings of tiers for a model before any text comes."""

from __future__ import annotations

from oval_core.config import OvalConfig, TierConfig
from oval_core.errors import ConfigError
from oval_core.routing.page_cutter import open_page_size
from oval_core.tiers.fast_memory import share_out
from oval_core.tiers.page_files import check_folder


def check_tiers(config: OvalConfig, num_layers: int) -> None:
    """Checks `config.tiers` for a model: sizes, layers, and that the disk can be written.

    Raises:
        ConfigError: what is wrong.
    """
    assert config.tiers is not None, "no tiers in the config"
    layers = tiered_layers(config.tiers, num_layers)
    share_out(config.tiers.fast_tokens, len(layers), open_page_size(config))
    if config.tiers.disk is not None:
        check_folder(config.tiers.disk)


def tiered_layers(config: TierConfig, num_layers: int) -> tuple[int, ...]:
    """Returns the decoder layers that have tiers.

    Raises:
        ConfigError: `dense_layers` names a layer that is not there, or all of them.
    """
    beyond = [layer for layer in config.dense_layers if layer >= num_layers]
    layers = tuple(i for i in range(num_layers) if i not in config.dense_layers)
    if beyond or not layers:
        raise ConfigError(
            f"tiers.dense_layers: got {list(config.dense_layers)}. Allowed: some of 0..{num_layers - 1}, not all. "
            "Choose among these, or leave tiers out."
        )
    return layers
