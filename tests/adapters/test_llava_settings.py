"""Settings of images: defaults, tiles of other sizes, and what is refused by name."""

from __future__ import annotations

import pytest
from tiny_models import assert_same_run, one_thread, run, shared
from tiny_towers import TOKENS, images, rows_of, tower_model
from transformers import VipLlavaConfig, VipLlavaForConditionalGeneration

from oval_adapters import attach
from oval_core.errors import ConfigError, UnsupportedModelError
from oval_core.vision_config import VisionConfig

_one_thread = pytest.fixture(autouse=True)(one_thread)


def test_defaults_hold_for_models_that_see_images() -> None:
    with attach(tower_model("clip")) as oval:
        assert oval.config.vision == VisionConfig()
    with attach(shared("llama")) as oval:
        assert oval.config.vision is None
        assert "vision" not in oval.stats()


def test_settings_for_images_are_refused_for_models_that_see_none() -> None:
    model = shared("llama")
    with pytest.raises(ConfigError, match=r"vision: got settings.*'llama'.*Allowed: with llava, "):
        attach(model, {"vision": {"tile": 2}})
    assert "generate" not in model.__dict__


def test_other_models_that_see_images_are_refused_by_name() -> None:
    text = shared("llava").config.text_config
    vision = shared("llava").config.vision_config
    config = VipLlavaConfig(vision_config=vision, text_config=text, vision_feature_layers=[-1])
    model = VipLlavaForConditionalGeneration._from_config(config)
    with pytest.raises(UnsupportedModelError, match=r"'vipllava'.*llava_next, llava_onevision"):
        attach(model)


@pytest.mark.parametrize(
    ("tile", "sizes"), [(1, [1] * 25), (2, [4, 4, 2] * 2 + [2, 2, 1]), (5, [25])]
)
def test_tiles_of_other_sizes(tile: int, sizes: list[int]) -> None:
    model = tower_model("clip")
    given = {**rows_of([[3, 6]], TOKENS["clip"]), "pixel_values": images(1), "max_new_tokens": 6}
    want = run(model, **given)
    routed = {"policy": "routed", "routing": {"budget_share": 1.0, "router": "sketch"}}
    for config in ({}, {**routed, "page_size": 4}):
        with attach(model, {**config, "vision": {"tile": tile}}):
            got = run(model, **given)
            assert_same_run(got, want)
            pages = got.cache.paged.table.sequences[0].pages
            assert [len(page) for page in pages if page.kind == "image"] == sizes


def test_a_small_budget_reads_pages_of_both_kinds() -> None:
    """Selections are lossy; what must hold is that they are made of whole pages and within the budget."""
    model = tower_model("clip")
    given = {**rows_of([[3, 20, 30]], TOKENS["clip"]), "pixel_values": images(2)}
    config = {
        "policy": "routed",
        "routing": {"token_budget": 48, "window_size": 8, "num_sink_tokens": 4, "dense_layers": []},
        "vision": {"tile": 5},
        "page_size": 8,
    }
    with attach(model, config) as oval:
        run(model, **given, max_new_tokens=10)
        routing = oval.stats()["routing"]
        assert routing["selections"] > 0
        assert 0 < routing["read_share"] < 0.7
