"""LLaVA on OVAL: images in the prompt, text-only rows beside them, and further turns on the same cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import (
    BACKENDS,
    assert_same_run,
    one_thread,
    padded,
    pictures,
    prompt,
    put_image,
    run,
    shared,
)

from oval_adapters import attach

_one_thread = pytest.fixture(autouse=True)(one_thread)


def one_image() -> dict[str, Any]:
    """One prompt with one image."""
    ids = prompt(14)
    put_image(ids, 0, 3)
    return {"input_ids": ids, "pixel_values": pictures(1)}


def two_images() -> dict[str, Any]:
    """One prompt with two images."""
    ids = prompt(25)
    put_image(ids, 0, 3)
    put_image(ids, 0, 15)
    return {"input_ids": ids, "pixel_values": pictures(2)}


def mixed_rows() -> dict[str, Any]:
    """A padded batch: two images, none, one."""
    inputs: dict[str, Any] = padded([25, 7, 16])
    put_image(inputs["input_ids"], 0, 3)
    put_image(inputs["input_ids"], 0, 15)
    put_image(inputs["input_ids"], 2, 12)
    return {**inputs, "pixel_values": pictures(3)}


INPUTS = {"one-image": one_image, "two-images": two_images, "mixed-rows": mixed_rows}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inputs", INPUTS)
def test_images_equal_hugging_face(inputs: str, backend: str, way: str) -> None:
    model = shared("llava")
    want = run(model, **INPUTS[inputs](), **WAYS[way])
    with attach(model, {"backend": backend}) as oval:
        assert_same_run(run(model, **INPUTS[inputs](), **WAYS[way]), want)
        assert oval.counters.forwards > 0


def test_the_image_matters() -> None:
    model, inputs = shared("llava"), one_image()
    other = {**inputs, "pixel_values": pictures(1, seed=9)}
    with attach(model):
        assert run(model, **inputs).sequences.tolist() != run(model, **other).sequences.tolist()


@pytest.mark.parametrize("inputs", ["one-image", "two-images"])
def test_a_second_turn_equals_hugging_face(inputs: str) -> None:
    model = shared("llava")

    def talk() -> Any:
        first = run(model, **INPUTS[inputs]())
        ids = torch.cat([first.sequences, prompt(6, seed=3)], 1)
        return run(model, ids, cache=first.cache)

    want = talk()
    with attach(model):
        assert_same_run(talk(), want)


def test_a_second_image_in_a_later_forward_equals_hugging_face() -> None:
    model, first = shared("llava"), one_image()
    more = prompt(9, seed=3)
    put_image(more, 0, 2)

    @torch.no_grad()
    def talk(cache: object) -> torch.Tensor:
        out = model(**first, cache=cache, use_cache=True)
        later = model(input_ids=more, pixel_values=pictures(1, seed=5), cache=out.cache)
        return torch.cat([out.logits, later.logits], 1)

    want = talk(None)
    with attach(model) as oval:
        assert (talk(oval.new_cache()) - want).abs().max() <= 1e-4


def test_only_the_text_model_changes_its_attention() -> None:
    model, seen = shared("llava"), []
    tower = model.model.vision_tower
    hook = tower.register_forward_hook(
        lambda *_: seen.append(
            (tower.config._attn_implementation, model.config._attn_implementation)
        )
    )
    with attach(model):
        run(model, **one_image())
    hook.remove()
    assert seen == [("sdpa", "sdpa")]
