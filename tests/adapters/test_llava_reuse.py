"""Image features are reused by content: never a wrong one, never more than asked for, gone at detach."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import assert_same_run, one_thread, run
from tiny_towers import TOKENS, build_tower, images, rows_of, tower_model

from oval_adapters import attach
from oval_adapters.vision.feature_cache import FeatureCache, ImageFeatures, image_key
from oval_mm.spans import Grid

_one_thread = pytest.fixture(autouse=True)(one_thread)

N = TOKENS["clip"]


@contextmanager
def tower_calls(model: Any) -> Iterator[list[int]]:
    """Images that the vision tower gets, call by call."""
    seen: list[int] = []
    hook = model.model.vision_tower.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(len(args[0])), with_kwargs=True
    )
    yield seen
    hook.remove()


def question(seed: int, *pixels: torch.Tensor) -> dict[str, Any]:
    """A question about some images."""
    layout = [[3, *[0] * (len(pixels) - 1), 6]]
    return {**rows_of(layout, N, seed), "pixel_values": torch.stack(pixels), "max_new_tokens": 6}


def test_a_second_question_does_not_run_the_tower() -> None:
    model, (a, b, c) = tower_model("clip"), images(3)
    asked = [
        question(1, a),
        question(2, a),
        question(3, b, a, b),
        question(4, c, a),
        question(5, c),
    ]
    want = [run(model, **one) for one in asked]
    with attach(model) as oval, tower_calls(model) as seen:
        for one, expected in zip(asked, want, strict=True):
            assert_same_run(run(model, **one), expected)
        assert seen == [1, 1, 1]  # a; b, once; c
        stats = oval.stats()["vision"]
        assert (stats["images_encoded"], stats["images_reused"]) == (3, 1 + 2 + 1 + 1)


def test_images_of_one_shape_are_told_apart_by_one_bit() -> None:
    model, (a,) = tower_model("clip"), images(1)
    b = a.clone()
    b[0, 0, 0] = torch.nextafter(b[0, 0, 0], torch.tensor(9.0))
    with attach(model) as oval:
        run(model, **question(1, a))
        run(model, **question(1, b))
        assert oval.stats()["vision"]["images_reused"] == 0
        run(model, **question(1, a.clone()))
        assert oval.stats()["vision"]["images_reused"] == 1


def test_no_more_images_are_kept_than_asked_for() -> None:
    model, pixels = tower_model("clip"), images(3)
    with attach(model, {"vision": {"reuse_images": 2}}) as oval, tower_calls(model) as seen:
        for index in (0, 1, 0, 2, 0, 1):  # 2 takes the place of 1
            run(model, **question(1, pixels[index]))
        assert seen == [1, 1, 1, 1]
        assert len(oval._vision._encoder.kept) == 2
    with attach(model, {"vision": {"reuse_images": 0}}), tower_calls(model) as seen:
        run(model, **question(1, pixels[0]))
        run(model, **question(1, pixels[0]))
        assert seen == [1, 1]


def test_nothing_outlives_the_attachment() -> None:
    model, (a,) = tower_model("clip"), images(1)
    with attach(model) as oval:
        run(model, **question(1, a))
        assert len(oval._vision._encoder.kept) == 1
    assert len(oval._vision._encoder.kept) == 0
    with attach(model), tower_calls(model) as seen:
        run(model, **question(1, a))
        assert seen == [1]


def change_in_place(model: Any) -> None:
    """As an optimizer does."""
    with torch.no_grad():
        model.model.vision_tower.embeddings.patch_embedding.weight.mul_(-1)


def change_behind(model: Any) -> None:
    """As merging of adapters does: autograd does not see it."""
    model.model.multi_modal_projector.linear_1.weight.data += 0.25


def change_reading(model: Any) -> None:
    """Other layers of the tower are read."""
    model.config.vision_feature_layer = -1


@pytest.mark.parametrize("change", [change_in_place, change_behind, change_reading])
def test_what_the_model_would_see_otherwise_is_encoded_anew(change: Any) -> None:
    model, (a,) = build_tower("clip"), images(1)
    with attach(model) as oval:
        first = run(model, **question(1, a))
        change(model)
        got = run(model, **question(1, a))
        assert oval.stats()["vision"]["images_reused"] == 0
    assert (got.logits[0] - first.logits[0]).abs().max() > 1e-3
    assert_same_run(got, run(model, **question(1, a)))


def test_forwards_without_oval_are_untouched() -> None:
    model, (a,) = tower_model("clip"), images(1)
    asked = question(1, a)
    new = asked.pop("max_new_tokens")
    with attach(model) as oval, tower_calls(model) as seen, torch.no_grad():
        for _ in range(2):
            run(model, **asked, max_new_tokens=new, use_oval=False)
            output = model(**asked)
            assert output.image_outputs.last_hidden_state is not None
            assert model.get_image_features(a[None]).last_hidden_state is not None
        assert seen == [1] * 6
        assert oval.stats()["vision"]["images_encoded"] == 0


@torch.no_grad()
def test_writing_into_what_came_back_changes_nothing() -> None:
    model, (a,) = tower_model("clip"), images(1)
    asked = question(1, a)
    asked.pop("max_new_tokens")
    with attach(model) as oval:
        first = model(**asked, cache=oval.new_cache())
        first.image_outputs.pooler_output[0].zero_()
        second = model(**asked, cache=oval.new_cache())
        assert oval.stats()["vision"]["images_reused"] == 1
        second.image_outputs.pooler_output[0].zero_()
        third = model(**asked, cache=oval.new_cache())
        assert torch.equal(first.logits, second.logits)
        assert torch.equal(first.logits, third.logits)


def test_detach_leaves_the_model_as_it_was() -> None:
    model = tower_model("clip")
    modules = list(model.modules())
    before = [dict(module.__dict__) for module in modules]
    oval = attach(model)
    assert "forward" in model.model.__dict__
    run(model, **question(1, images(1)[0]))
    oval.detach()
    for module, kept in zip(modules, before, strict=True):
        assert module.__dict__.keys() == kept.keys()
        methods = {name: value for name, value in kept.items() if callable(value)}
        assert all(module.__dict__[name] is value for name, value in methods.items())


@settings(max_examples=60, deadline=None)
@given(
    capacity=st.integers(0, 4),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=30),
)
def test_the_cache_holds_the_last_ones_used(capacity: int, steps: list[tuple[bool, int]]) -> None:
    cache, order = FeatureCache(capacity), []
    made = {i: ImageFeatures(torch.full((1, 1), i), None, (Grid(1, 1),)) for i in range(7)}
    for puts, number in steps:
        key = bytes([number])
        if puts:
            cache.put(key, made[number])
            order = [*(old for old in order if old != number), number][
                -capacity or len(order) + 1 :
            ]
        else:
            found = cache.get(key)
            assert found is (made[number] if number in order else None)
            if number in order:
                order = [*(old for old in order if old != number), number]
        assert len(cache) == len(order) <= capacity


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_keys_are_equal_only_for_equal_images(data: st.DataObject) -> None:
    shapes = st.sampled_from([(2, 3), (3, 2), (6,), (0, 3)])
    kinds = st.sampled_from([torch.float32, torch.bfloat16, torch.int32])
    made = []
    for _ in range(2):
        shape, kind = data.draw(shapes), data.draw(kinds)
        values = data.draw(st.sampled_from([0, 1]))
        facts = data.draw(st.sampled_from([None, (2, 3), (3, 2)]))
        made.append((torch.full(shape, values, dtype=kind), facts))
    (a, fact_a), (b, fact_b) = made
    same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) and fact_a == fact_b
    assert (image_key(a, fact_a) == image_key(b, fact_b)) == same
