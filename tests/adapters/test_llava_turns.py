"""One OVAL cache over several turns with images: text alone, another image, crop, reorder, copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import assert_same_run, one_thread, prompt, run
from tiny_towers import TOKENS, images, rows_of, tower_model

from oval_adapters import attach

_one_thread = pytest.fixture(autouse=True)(one_thread)

TOKENS_CLIP = TOKENS["clip"]
SETTINGS: list[dict[str, Any] | None] = [None, {"tiers": {"fast_tokens": 128}}]


def talk(new: dict[str, Any], **ways: Any) -> list[Any]:
    """A question about two images, then a turn with `new` ids (and images) on the same cache, then text."""
    model = tower_model("clip")
    ways = {"max_new_tokens": 6, **ways}
    first = run(model, **rows_of([[2, 5, 6]], TOKENS_CLIP), pixel_values=images(2), **ways)
    ids = torch.cat([first.sequences, new.pop("input_ids")], 1)
    second = run(model, ids, cache=first.cache, **new, **ways)
    ids = torch.cat([second.sequences, prompt(5, seed=8)], 1)
    return [first, second, run(model, ids, cache=second.cache, **ways)]


def text_turn() -> dict[str, Any]:
    """A turn of text alone."""
    return {"input_ids": prompt(6, seed=3)}


def image_turn() -> dict[str, Any]:
    """A turn with another image."""
    ids = rows_of([[4, 5]], TOKENS_CLIP, seed=5)["input_ids"]
    return {"input_ids": ids, "pixel_values": images(1, seed=7)}


@pytest.mark.parametrize("config", SETTINGS)
@pytest.mark.parametrize("turn", [text_turn, image_turn])
def test_turns_equal_hugging_face(turn: Any, config: dict[str, Any] | None) -> None:
    want = talk(turn())
    with attach(tower_model("clip"), config):
        got = talk(turn())
    for ours, theirs in zip(got, want, strict=True):
        assert_same_run(ours, theirs)
    found = got[-1].cache.images[0]
    expected = 3 if turn is image_turn else 2
    assert [image.span.image for image in found] == list(range(expected))
    assert [image.span.length for image in found] == [TOKENS_CLIP] * expected


def test_an_image_turn_in_chunks_equals_hugging_face() -> None:
    want = talk(image_turn(), prefill_chunk_size=9)
    with attach(tower_model("clip")):
        got = talk(image_turn(), prefill_chunk_size=9)
    for ours, theirs in zip(got, want, strict=True):
        assert_same_run(ours, theirs)
    found = got[-1].cache.images[0]
    assert [image.span.length for image in found] == [TOKENS_CLIP] * 3


@torch.no_grad()
def filled(oval: Any) -> Any:
    """A cache of two rows: two images, and one."""
    cache = oval.new_cache()
    given = rows_of([[2, 5, 6], [3, 4]], TOKENS_CLIP)
    tower_model("clip")(**given, pixel_values=images(3), cache=cache)
    return cache


def spans(cache: Any) -> list[list[tuple[int, int, int]]]:
    """Image, start and length of what each row holds."""
    return [
        [(own.span.image, own.span.start, own.span.length) for own in row] for row in cache.images
    ]


def test_images_follow_crop_reorder_copy_and_reset() -> None:
    n = TOKENS_CLIP
    with attach(tower_model("clip")) as oval:
        cache = filled(oval)
        whole = [[(0, 2, n), (1, 7 + n, n)], [(0, 3, n)]]
        assert spans(cache) == whole
        twin = copy.deepcopy(cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        assert spans(cache) == whole[::-1]
        cache.batch_repeat_interleave(2)
        assert spans(cache) == [whole[1], whole[1], whole[0], whole[0]]
        shared = {page for row in cache.images for image in row for page in image.pages}
        assert len(shared) == 3 * 4, "images of repeated rows share their pages"
        cache.crop(-10)  # the second image loses four tokens
        assert spans(cache)[2] == [(0, 2, n), (1, 7 + n, n - 4)]
        (_, cut) = cache.images[2]
        assert len(cut.features) == n - 4
        cache.paged.table.check_integrity()
        assert spans(twin) == whole
        twin.crop(-(6 + n + 5))
        assert spans(twin)[0] == [(0, 2, n)]
        twin.crop(-(n + 2))
        assert spans(twin) == [[], []]
        cache.reset()
        assert cache.images == ()


def test_a_forward_that_fails_leaves_no_image() -> None:
    model = tower_model("clip")
    given = {**rows_of([[2, 4]], TOKENS_CLIP), "pixel_values": images(1)}
    layer = model.get_decoder().layers[1]
    with attach(model) as oval, torch.no_grad():
        cache = oval.new_cache()
        hook = layer.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**given, cache=cache)
        hook.remove()
        assert cache.images == ()
        assert oval.stats()["vision"]["image_pages"] == 0
        model(**given, cache=cache)
        assert len(cache.images[0]) == 1
