"""Names in settings and arguments of other kinds are refused at the door: at attach, and at the call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from prefill_world import N, config, inputs
from tiny_models import one_thread, run, shared
from tiny_towers import tower_model
from transformers import DynamicCache

from oval_adapters import attach
from oval_adapters.named_parts import check_names
from oval_adapters.speculative.drafters import shipped_heads
from oval_adapters.vision.prefill_settings import check_image_clip
from oval_core.config import OvalConfig
from oval_core.errors import ConfigError
from oval_core.vision_config import VisionConfig
from oval_mm.page_choice import SCORER_NAMES

_one_thread = pytest.fixture(autouse=True)(one_thread)


@pytest.mark.parametrize(
    ("section", "word"),
    [
        ({"vision": {"router": "unifrom"}}, "vision.router: got 'unifrom'; did you mean 'uniform'"),
        ({"vision": {"router": "fusion"}}, "vision.router: got 'fusion'"),
        ({"vision": {"router": "./nowhere"}}, "fusion router nowhere: .*cannot be read"),
        ({"speculation": {"tree": "zz"}}, "speculation.tree: got 'zz'"),
        ({"speculation": {"drafter": "ngram", "heads": "nosuch"}}, "speculation.heads: got 'nosuch'"),
    ],
)  # fmt: skip
def test_names_that_lead_nowhere_are_refused_at_attach(section: Any, word: str) -> None:
    model = tower_model("clip")
    with pytest.raises(ConfigError, match=word):
        attach(model, section)
    assert "generate" not in model.__dict__


def test_names_that_lead_somewhere(tmp_path: Path) -> None:
    for router in {"auto", *SCORER_NAMES} - {"fusion"}:
        check_names(OvalConfig(vision=VisionConfig(router=router)))
    for heads in ("auto", str(tmp_path), *shipped_heads()):
        check_names(OvalConfig.from_dict({"speculation": {"heads": heads, "tree": "mc_sim_7b_63"}}))


@pytest.mark.parametrize(
    ("clip", "word"),
    [(None, "got null"), ("./nowhere", "'./nowhere' cannot be loaded"), ("nosuch", "'nosuch' cannot be loaded")],
)  # fmt: skip
def test_a_clip_is_looked_for_where_one_is_needed(clip: str | None, word: str) -> None:
    with pytest.raises(ConfigError, match=f"vision.clip: {word}"):
        check_image_clip(VisionConfig(budget=0.5, router="clip", clip=clip))
    for other in ({"budget": 0.5, "router": "uniform"}, {"router": "clip"}):
        check_image_clip(VisionConfig(clip=clip, **other))
    check_image_clip(None)


def test_an_architecture_that_open_clip_does_not_know() -> None:
    pytest.importorskip("open_clip")
    check_image_clip(VisionConfig(budget=0.5, clip="open_clip:ViT-B-32,anything"))
    for name in ("open_clip:NoSuchModel", "open_clip:local-dir:/nowhere"):
        with pytest.raises(ConfigError, match="cannot be loaded"):
            check_image_clip(VisionConfig(budget=0.5, clip=name))


@pytest.mark.parametrize("budget", [0.5, None])
def test_read_images_takes_a_cache_of_its_own(budget: float | None) -> None:
    with attach(tower_model("clip"), {"vision": {"budget": budget}}) as oval:
        for wrong in (None, 3, "c", DynamicCache()):
            with pytest.raises(ConfigError, match=f"read_images: got {type(wrong).__name__}"):
                oval.read_images(wrong)  # type: ignore[arg-type]
        with attach(shared("llama")) as other, pytest.raises(ConfigError, match="another attach"):
            oval.read_images(other.new_cache())
        assert oval.read_images(oval.new_cache()) == 0


def test_image_tokens_without_pixels_are_plain_tokens_as_in_hugging_face() -> None:
    model = tower_model("clip")
    told = {name: own for name, own in inputs([[3, 6]]).items() if name != "pixel_values"}
    want = run(model, **told, max_new_tokens=4).sequences.tolist()
    for settings in (None, config()):
        with attach(model, settings):
            assert run(model, **told, max_new_tokens=4).sequences.tolist() == want


def test_another_number_of_image_tokens_than_of_features_is_told_in_tokens() -> None:
    model, told = tower_model("clip"), inputs([[3, 4, 6]])
    told["pixel_values"] = told["pixel_values"][:1]
    with attach(model) as oval:
        word = f"got {2 * N} image tokens in the text, and features of {N} tokens from 1 images"
        with pytest.raises(ConfigError, match=word):
            model.generate(**told, max_new_tokens=2)
        with pytest.raises(ConfigError, match=word), torch.no_grad():
            model(**told, cache=oval.new_cache())
        with pytest.raises(ConfigError, match=r"pixel_values: got shape \(3, .*pixels\[None\]"):
            model.generate(**{**told, "pixel_values": told["pixel_values"][0]}, max_new_tokens=2)


def test_images_of_a_cache_print_on_a_line() -> None:
    with attach(tower_model("clip")) as oval:
        cache = oval.new_cache()
        tower_model("clip").generate(**inputs([[3, 6]]), cache=cache, max_new_tokens=1)
        told = repr(cache.images)
    assert f"features=[{N}, " in told
    assert "tensor(" not in told
    assert len(told) < 300
