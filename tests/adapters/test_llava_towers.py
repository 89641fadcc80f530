"""LLaVA with several vision towers on OVAL: the same tokens as plain Hugging Face, and images in pages of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import IMAGE_TOKEN, assert_same_run, one_thread, prompt, run
from tiny_towers import GRID, TOKENS, TOWERS, images, rows_of, tower_model

from oval_adapters import attach

_one_thread = pytest.fixture(autouse=True)(one_thread)

LAYOUTS: dict[str, list[list[int]]] = {
    "one": [[3, 9]],
    "side-by-side": [[3, 0, 0, 4]],
    "mixed-rows": [[2, 5, 6], [30], [0, 4]],
}
"""Lengths of text, by row; images lie between them."""

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampling-many": {"do_sample": True, "num_return_sequences": 2},
    "chunked": {"prefill_chunk_size": 7},
    "tiers": {"oval": {"tiers": {"fast_tokens": 96}}},
    "tiers-window": {"oval": {"tiers": {"fast_tokens": 128, "prefetch": "none"}, "page_size": 8}},
    "routed-whole": {
        "oval": {"policy": "routed", "routing": {"budget_share": 1.0, "dense_layers": []}}
    },
    "guarded-whole": {
        "oval": {"policy": "guarded", "routing": {"budget_share": 1.0, "sizing": "key_similarity"}}
    },
}


def inputs(tower: str, layout: str) -> dict[str, Any]:
    """Prompts with images."""
    rows = LAYOUTS[layout]
    count = sum(len(row) - 1 for row in rows)
    given: dict[str, Any] = rows_of(rows, TOKENS[tower])
    return {**given, "pixel_values": images(count), "max_new_tokens": 6}


def check_pages(cache: Any, *, is_cut: bool = False) -> None:
    """An image has pages of its own, each a rectangle of patches, or a part of one; text has the others."""
    for row, (seq, found) in enumerate(zip(cache.paged.table.sequences, cache.images, strict=True)):
        by_id = {page.page_id: page for page in seq.pages}
        taken: set[int] = set()
        for image in found:
            span = image.span
            held = [by_id[page] for page in image.pages]
            tokens = sorted(token for page in held for token in page.tokens)
            assert tokens == list(range(span.start, span.start + span.length)), row
            assert len(image.features) == span.length
            assert all(page.kind == "image" and page.sealed for page in held)
            taken.update(image.pages)
            for page in held:
                places = [divmod(token - span.start, span.grid.width) for token in page.tokens]
                high = {place[0] for place in places}
                wide = {place[1] for place in places}
                assert max(high) - min(high) < 4 >= max(wide) - min(wide) + 1
                assert is_cut or len(high) * len(wide) == len(places)
        others = [page for page in seq.pages if page.page_id not in taken]
        assert all(page.kind == "text" for page in others)
    cache.paged.table.check_integrity()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tower", TOWERS)
def test_towers_equal_hugging_face(tower: str, layout: str) -> None:
    model, given = tower_model(tower), inputs(tower, layout)
    want = run(model, **given)
    with attach(model, {"policy": "full"}) as oval:
        got = run(model, **given)
        assert_same_run(got, want)
        check_pages(got.cache)
        count = len(given["pixel_values"])
        stats = oval.stats()["vision"]
        assert (stats["images_encoded"], stats["images_reused"]) == (count, 0)
        numbers = [[image.span.image for image in row] for row in got.cache.images]
        views = 2 if tower == "clip-full" else 1
        assert numbers == [
            [image for image in range(len(row) - 1) for _ in range(views)]
            for row in LAYOUTS[layout]
        ]
        per_image = 4 + (views - 1)  # a grid of 5 x 5 is four tiles
        assert stats["image_pages"] == count * per_image
        for row, ids in zip(got.cache.images, given["input_ids"], strict=True):
            own = ids[ids != 0]
            for image in row:
                span = image.span
                assert bool((own[span.start : span.start + span.length] == IMAGE_TOKEN).all())
                assert span.grid.rows in (1, GRID)


@pytest.mark.parametrize("way", [name for name in WAYS if name != "greedy"])
def test_ways_equal_hugging_face(way: str) -> None:
    settings = dict(WAYS[way])
    config = settings.pop("oval", None)
    model, given = tower_model("clip"), inputs("clip", "mixed-rows")
    want = run(model, **given, **settings)
    with attach(model, config) as oval:
        got = run(model, **given, **settings)
        assert_same_run(got, want)
        check_pages(got.cache, is_cut=way.startswith(("chunked", "tiers")))
        assert oval.stats()["vision"]["images_encoded"] == 3
        if config and "tiers" in config:
            assert oval.stats()["tiers"]["bytes_stored"] > 0


def test_features_and_hidden_states_are_those_of_the_image() -> None:
    model, given = tower_model("clip"), inputs("clip", "mixed-rows")
    with torch.no_grad():
        want = model.model.get_image_features(given["pixel_values"], output_hidden_states=True)
    with attach(model):
        cache = run(model, **given, prefill_chunk_size=7).cache
    found = [image for row in cache.images for image in row]
    assert [len(row) for row in cache.images] == [2, 0, 1]
    for index, image in enumerate(found):
        assert torch.allclose(image.features, want.pooler_output[index], atol=1e-5)
        assert torch.allclose(image.hidden, want.hidden_states[-2][index, 1:], atol=1e-5)


def test_different_images_give_different_logits() -> None:
    for tower in TOWERS:
        model, given = tower_model(tower), {**inputs(tower, "one"), "max_new_tokens": 1}
        with attach(model):
            same = run(model, **given).logits[0]
            other = run(model, **{**given, "pixel_values": images(1, seed=9)}).logits[0]
        assert (same - other).abs().max() > 1e-2, tower


def test_text_alone() -> None:
    model = tower_model("siglip")
    want = run(model, prompt(20, batch=2))
    with attach(model) as oval:
        got = run(model, prompt(20, batch=2))
        assert_same_run(got, want)
        assert got.cache.images == ((), ())
        assert oval.stats()["vision"] == {"images_encoded": 0, "images_reused": 0, "image_pages": 0}


def test_image_tokens_without_an_image_are_text() -> None:
    model = tower_model("clip")
    ids = rows_of([[3, 5]], TOKENS["clip"])["input_ids"]
    want = run(model, ids)
    with attach(model):
        got = run(model, ids)
        assert_same_run(got, want)
        assert got.cache.images == ((),)


def test_embeddings_in_place_of_ids() -> None:
    model, given = tower_model("clip"), inputs("clip", "mixed-rows")
    ids = given.pop("input_ids")
    given["inputs_embeds"] = model.get_input_embeddings()(ids).detach()
    want = run(model, **given, num_beams=2)
    with attach(model):
        got = run(model, **given, num_beams=2)
        assert_same_run(got, want)
        check_pages(got.cache)
        assert [len(row) for row in got.cache.images] == [2, 2, 0, 0, 1, 1]


def test_features_that_the_caller_encoded() -> None:
    model, given = tower_model("clip"), inputs("clip", "side-by-side")
    pixels = given.pop("pixel_values")

    def talk() -> Any:
        with torch.no_grad():
            output = model.model.get_image_features(pixels)
        return run(model, **given, mm_encoder_outputs={"image": output})

    want = talk()
    with attach(model) as oval:
        got = talk()
        assert_same_run(got, want)
        check_pages(got.cache)
        assert [image.span.grid.rows for image in got.cache.images[0]] == [GRID] * 3
        assert oval.stats()["vision"]["images_encoded"] == 0


def test_a_mask_that_hides_a_part_of_an_image() -> None:
    model, given = tower_model("clip"), inputs("clip", "one")
    given["attention_mask"][0, 6:12] = 0
    want = run(model, **given)
    with attach(model):
        got = run(model, **given)
        assert_same_run(got, want)
        (image,) = got.cache.images[0]
        assert image.span.length == TOKENS["clip"] - 6 == len(image.features)
        got.cache.paged.table.check_integrity()


def test_other_sizes_of_pictures() -> None:
    """DINOv2 reads any size; tokens are rows x columns of patches."""
    model = tower_model("dinov2")
    generator = torch.Generator().manual_seed(4)
    given = {
        **rows_of([[3, 6]], 3 * 7),
        "pixel_values": torch.randn(1, 3, 24, 56, generator=generator),
    }
    want = run(model, **given)
    with attach(model):
        got = run(model, **given)
        assert_same_run(got, want)
        check_pages(got.cache)
        grid = got.cache.images[0][0].span.grid
        assert (grid.rows, grid.cols) == (3, 7)
