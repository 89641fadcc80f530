"""LLaVA-NeXT and OneVision: an overview and a grid with newline tokens, in pages of their own; the tokens of plain HF."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import IMAGE_TOKEN, assert_same_run, one_thread, prompt, run
from tiny_towers import GRID, SIDE, parts_model

from oval_adapters import attach
from oval_mm.spans import Grid

_one_thread = pytest.fixture(autouse=True)(one_thread)

SIZES = [(40, 80), (80, 30), (80, 66)]
"""Pictures: two parts side by side, two on top of each other with padding, four with padding that no patch is lost to."""

KINDS = ("next", "onevision")


def batch(kind: str, sizes: list[tuple[int, int]], rows: list[list[int]]) -> dict[str, Any]:
    """Rows of pictures (numbers in `sizes`) with text around them, padded on the left."""
    model = parts_model(kind)
    generator = torch.Generator().manual_seed(3)
    chosen = [sizes[image] for row in rows for image in row]
    pixels = torch.zeros(len(chosen), 5, 3, SIDE, SIDE)
    for index, (high, wide) in enumerate(chosen):
        count = 1 + 2 * (1 + (high > SIDE and wide > SIDE))
        pixels[index, :count] = torch.randn(count, 3, SIDE, SIDE, generator=generator)
    extra: dict[str, Any] = {"pixel_values": pixels, "image_sizes": torch.tensor(chosen)}
    if kind == "onevision":
        extra["batch_num_images"] = torch.tensor([len(row) for row in rows if row])
    with torch.no_grad():
        output = model.model.get_image_features(**extra)
    lengths = iter(len(features) for features in output.pooler_output)
    texts = []
    for number, row in enumerate(rows):
        ids = prompt(4, seed=number)[0].tolist()
        for _ in row:
            ids += [IMAGE_TOKEN] * next(lengths) + prompt(3, seed=number + 9)[0].tolist()
        texts.append(ids)
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in texts])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), **extra}


def views(cache: Any) -> list[list[tuple[int, Grid]]]:
    """Number and grid of what each row holds."""
    return [[(own.span.image, own.span.grid) for own in row] for row in cache.images]


@pytest.mark.parametrize("way", [{}, {"num_beams": 2}, {"prefill_chunk_size": 19}])
@pytest.mark.parametrize("kind", KINDS)
def test_pictures_in_parts_equal_hugging_face(kind: str, way: dict[str, Any]) -> None:
    model = parts_model(kind)
    rows = [[0], [], [1]] if kind == "onevision" else [[0, 1], [], [2]]
    given = batch(kind, SIZES, rows)
    want = run(model, **given, max_new_tokens=8, **way)
    with attach(model) as oval:
        got = run(model, **given, max_new_tokens=8, **way)
        assert_same_run(got, want)
        overview = Grid(GRID, GRID)
        found = views(got.cache)[:: way.get("num_beams", 1)]
        if kind == "next":
            assert found[0] == [
                (0, overview),
                (0, Grid(5, 10, newline=True)),
                (1, overview),
                (1, Grid(10, 3, newline=True)),
            ]
            assert found[2] == [(0, overview), (0, Grid(10, 8, newline=True))]
        else:
            assert found[0] == [(0, overview), (0, Grid(5, 10, newline=True))]
        assert found[1] == []
        first = got.cache.images[0]
        assert sum(len(image.features) for image in first if image.span.image == 0) == 25 + 55
        table = got.cache.paged.table
        table.check_integrity()
        images = sum(page.kind == "image" for page in table.pages())
        assert images == len({p for row in got.cache.images for own in row for p in own.pages})
        assert oval.stats()["vision"]["images_encoded"] == len(given["pixel_values"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_grid_is_made_smaller_where_the_model_does(kind: str) -> None:
    model, given = parts_model(kind), batch(kind, SIZES, [[2]])
    want = run(model, **given, max_new_tokens=6)
    with attach(model):
        got = run(model, **given, max_new_tokens=6)
        assert_same_run(got, want)
        grid = got.cache.images[0][1].span.grid
        # OneVision keeps no more than two overviews of tokens: 10 x 8 become 7 x 6
        assert grid == (Grid(10, 8, newline=True) if kind == "next" else Grid(7, 6, newline=True))


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_are_reused(kind: str) -> None:
    model = parts_model(kind)
    alone, both = batch(kind, SIZES, [[0]]), batch(kind, SIZES, [[0], [1]])
    both["pixel_values"][0] = alone["pixel_values"][0]
    want = [run(model, **own, max_new_tokens=6) for own in (alone, both)]
    with attach(model) as oval:
        assert_same_run(run(model, **alone, max_new_tokens=6), want[0])
        assert_same_run(run(model, **both, max_new_tokens=6), want[1])
        stats = oval.stats()["vision"]
        assert (stats["images_encoded"], stats["images_reused"]) == (2, 1)


def test_several_pictures_of_a_row_in_onevision() -> None:
    """They are read without parts, each with one newline token behind it; alone they would be read in parts."""
    model, given = parts_model("onevision"), batch("onevision", SIZES, [[0, 1], [2]])
    want = run(model, **given, max_new_tokens=6)
    with attach(model) as oval:
        for _ in range(2):
            got = run(model, **given, max_new_tokens=6)
            assert_same_run(got, want)
        lone = [(0, Grid(5, 5)), (0, Grid(1, 1)), (1, Grid(5, 5)), (1, Grid(1, 1))]
        assert views(got.cache)[0] == lone
        alone = batch("onevision", SIZES, [[0]])
        alone["pixel_values"] = given["pixel_values"][:1]
        expected = run(model, **alone, max_new_tokens=6, use_oval=False)
        assert_same_run(run(model, **alone, max_new_tokens=6), expected)
        stats = oval.stats()["vision"]
        assert (stats["images_encoded"], stats["images_reused"]) == (4, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_text_alone(kind: str) -> None:
    model = parts_model(kind)
    want = run(model, prompt(20), max_new_tokens=6)
    with attach(model):
        assert_same_run(run(model, prompt(20), max_new_tokens=6), want)
