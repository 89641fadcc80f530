"""Settings of image pages: strict, as all settings are."""

from __future__ import annotations

import pytest

from oval_core.config import OvalConfig
from oval_core.errors import ConfigError
from oval_core.vision_config import VisionConfig


def test_defaults_and_mappings() -> None:
    assert OvalConfig().vision is None
    config = OvalConfig.from_dict({"vision": {"tile": 3}})
    assert config.vision == VisionConfig(tile=3, reuse_images=8)
    assert OvalConfig.from_dict(config.to_dict()) == config
    assert VisionConfig.from_dict(config.vision) is config.vision


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tile": 0}, r"vision\.tile: got 0"),
        ({"tile": 6}, r"vision\.tile: got 6"),
        ({"tile": True}, r"vision\.tile"),
        ({"reuse_images": -1}, r"vision\.reuse_images: got -1"),
        ({"reuse_images": 1.5}, r"vision\.reuse_images"),
        ({"tiles": 4}, r"'vision\.tiles': did you mean 'tile'"),
        (4, "vision: got 4"),
    ],
)
def test_wrong_settings_are_refused(values: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OvalConfig(vision=values)


def test_a_page_of_the_largest_tile_fits() -> None:
    assert [VisionConfig(tile=tile).page_tokens for tile in (1, 4, 5)] == [2, 20, 30]
