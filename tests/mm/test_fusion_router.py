"""The fusion router: what its scores are, how it begins, files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from oval_core.errors import ConfigError
from oval_mm.fusion_checkpoint import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    TrainedFusion,
    load_fusion,
    save_fusion,
)
from oval_mm.fusion_clip import ClipSample, fit_to_clip
from oval_mm.fusion_router import FusionConfig, FusionRouter, FusionView
from oval_mm.page_choice import FusionScorer, ImagePages, QuestionPages, fusion_view
from oval_mm.spans import Grid
from oval_mm.tiles import tile_pages

C = 24


def router(init: str = "random", seed: int = 0, **changes: int) -> FusionRouter:
    torch.manual_seed(seed)
    made = FusionRouter(FusionConfig(hidden_size=C, size=16, num_heads=2, init=init, **changes))
    with torch.no_grad():
        for weight in (made.out.weight, made.pool.weight, made.refine[2].weight):
            weight.normal_(0, 0.2)
    return made.eval()


def view(num_text: int = 7, num_image: int = 12, page: int = 4, seed: int = 1) -> FusionView:
    generator = torch.Generator().manual_seed(seed)
    return FusionView(
        text=torch.randn(num_text, C, generator=generator),
        image=torch.randn(num_image, C, generator=generator),
        text_page=torch.arange(num_text) // 5,
        image_page=torch.arange(num_image) // page,
    )


def scores_slowly(model: FusionRouter, seen: FusionView) -> list[float]:
    """Page scores, token by token and head by head."""

    def inside(linear: torch.nn.Linear, states: torch.Tensor) -> torch.Tensor:
        return linear(F.layer_norm(states, (C,)))

    text = [inside(model.text_in, t) for t in seen.text]
    image = [inside(model.image_in, i) for i in seen.image]
    heads, size = model.config.num_heads, model.config.size
    width, asked = size // heads, []
    for token in text[-model.config.max_text :]:
        mixed = torch.zeros(size)
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            query = model.query(token)[part]
            weights = [
                math.exp(float(query @ model.key(i)[part]) / math.sqrt(width)) for i in image
            ]
            for weight, i in zip(weights, image, strict=True):
                mixed[part] += weight / sum(weights) * model.value(i)[part]
        asked.append(token + model.out(mixed))
    pull = [math.exp(float(model.pool(token))) for token in asked]
    query = sum(p / sum(pull) * token for p, token in zip(pull, asked, strict=True))
    query = query / query.norm()
    sums = [0.0] * (seen.num_text_pages + seen.num_image_pages)
    placed = [(t, int(p), 0) for t, p in zip(text, seen.text_page, strict=True)]
    placed += [
        (i, seen.num_text_pages + int(p), 1) for i, p in zip(image, seen.image_page, strict=True)
    ]
    for token, page, kind in placed:
        token = token + model.refine(token)
        score = math.exp(float(model.log_sharpness)) * float(token @ query / token.norm())
        sums[page] += math.exp(score + float(model.kind_bias[kind]))
    return [math.log(total) for total in sums]


@torch.no_grad()
@pytest.mark.parametrize("init", ["random", "key-mean"])
def test_scores_equal_the_slow_ones(init: str) -> None:
    model = router(init, max_text=5)
    model.kind_bias.copy_(torch.tensor([0.3, -0.4]))
    torch.testing.assert_close(model(view()), torch.tensor(scores_slowly(model, view())), atol=1e-4, rtol=1e-4)  # fmt: skip


@torch.no_grad()
@settings(deadline=None, max_examples=20)
@given(st.permutations(range(3)), st.integers(0, 5))
def test_pages_may_come_in_any_order(order: list[int], seed: int) -> None:
    model, seen = router(), view(seed=seed)
    moved = [4 * page + i for page in order for i in range(4)]
    other = FusionView(
        text=seen.text,
        image=seen.image[moved],
        text_page=seen.text_page,
        image_page=seen.image_page,
    )
    want = model(seen)
    torch.testing.assert_close(model(other)[2:], want[2:][order], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_scores_are_log_masses_and_densities_are_by_token() -> None:
    model, seen = router(), view(num_image=13)
    mass = model(seen).exp()
    whole = FusionView(
        text=seen.text, image=seen.image, text_page=seen.text_page, image_page=torch.zeros(13, dtype=torch.long)
    )  # fmt: skip
    torch.testing.assert_close(model(whole)[2].exp(), mass[2:].sum())
    counts = torch.tensor([5, 2, 4, 4, 4, 1])
    torch.testing.assert_close(model.density(seen), model(seen) - counts.log())


@torch.no_grad()
def test_image_changes_the_question() -> None:
    model, seen = router(), view()
    other = FusionView(
        text=seen.text,
        image=view(seed=5).image,
        text_page=seen.text_page,
        image_page=seen.image_page,
    )
    assert not torch.allclose(
        model(seen)[:2], model(other)[:2], atol=1e-3
    )  # scores of text pages, even
    bare = FusionView(
        text=seen.text,
        image=seen.image[:0],
        text_page=seen.text_page,
        image_page=seen.image_page[:0],
    )
    assert model(bare).shape == (2,)


@torch.no_grad()
def test_key_mean_begins_as_the_cosine_of_means() -> None:
    torch.manual_seed(2)
    model = FusionRouter(FusionConfig(hidden_size=C, size=C, init="key-mean"))
    image = torch.randn(5, C).repeat_interleave(
        4, 0
    )  # equal tokens in a page: the sum of exp is its mean
    seen = FusionView(
        text=view().text, image=image, text_page=view().text_page, image_page=torch.arange(20) // 4
    )
    text = F.layer_norm(seen.text, (C,)).mean(0)
    want = F.cosine_similarity(F.layer_norm(image[::4], (C,)), text, dim=-1)
    torch.testing.assert_close(model.density(seen)[2:] / 10, want, atol=1e-4, rtol=1e-4)


def clip_samples(count: int, seed: int) -> list[ClipSample]:
    """Rows whose CLIP embeddings are a fixed linear map of what the decoder gets."""
    generator = torch.Generator().manual_seed(0)
    to_text, to_image = torch.randn(2, C, 40, generator=generator) / C**0.5
    centre = torch.randn(40, generator=generator)
    samples = []
    for number in range(count):
        seen = view(num_image=24, seed=100 * seed + number)
        image = seen.image[::4].repeat_interleave(4, 0)
        seen = FusionView(
            text=seen.text, image=image, text_page=seen.text_page, image_page=seen.image_page
        )
        question = F.layer_norm(seen.text, (C,)).mean(0) @ to_text + 0.2 * centre
        pages = F.layer_norm(image[::4], (C,)) @ to_image + 0.2 * centre
        samples.append(ClipSample(view=seen, question=question, pages=pages))
    return samples


@torch.no_grad()
def test_clip_init_ranks_pages_as_clip_does() -> None:
    torch.manual_seed(4)
    model = FusionRouter(FusionConfig(hidden_size=C, size=32, init="clip")).eval()
    before = _agreement(model)
    fit_to_clip(model, clip_samples(200, seed=1), ridge=1e-4)
    after = _agreement(model)
    assert before < 0.5  # chance is one in six
    assert after > 0.75


def _agreement(model: FusionRouter) -> float:
    hits, tests = 0, clip_samples(60, seed=2)
    for sample in tests:
        wanted = F.cosine_similarity(sample.pages, sample.question, dim=-1).argmax()
        hits += int(model.density(sample.view)[2:].argmax() == wanted)
    return hits / len(tests)


def test_fit_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="init='clip'"):
        fit_to_clip(router("random"), clip_samples(2, 0))
    with pytest.raises(ConfigError, match="got none"):
        fit_to_clip(router("clip"), [])


def test_a_saved_router_scores_the_same(tmp_path: Path) -> None:
    model = router("key-mean")
    save_fusion(
        tmp_path / "r",
        TrainedFusion(router=model, model={"model_type": "llama"}, training={"seed": 3}),
    )
    loaded = load_fusion(tmp_path / "r")
    assert (loaded.model, loaded.training) == ({"model_type": "llama"}, {"seed": 3})
    assert not loaded.router.training
    with torch.no_grad():
        assert torch.equal(loaded.router(view()), model(view()))


def test_broken_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_fusion(tmp_path)
    save_fusion(tmp_path, TrainedFusion(router=router()))
    (tmp_path / WEIGHTS_NAME).write_bytes(b"no weights")
    with pytest.raises(ConfigError, match="do not make a router"):
        load_fusion(tmp_path)
    values = json.loads((tmp_path / CONFIG_NAME).read_text())
    (tmp_path / CONFIG_NAME).write_text(json.dumps({**values, "format": "other"}))
    with pytest.raises(ConfigError, match="format"):
        load_fusion(tmp_path)


@pytest.mark.parametrize(
    "wrong", [{"size": 10, "num_heads": 4}, {"init": "best"}, {"hidden_size": 0}]
)
def test_wrong_shapes_are_told(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        FusionConfig(**{"hidden_size": C, **wrong})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown keys"):
        FusionConfig.from_dict({"hidden_size": C, "sise": 3})


@torch.no_grad()
def test_as_a_scorer_it_ranks_by_density() -> None:
    model = router()
    grids = [Grid(4, 4), Grid(2, 3, True)]
    images = [
        ImagePages(features=torch.randn(g.size, C), pages=tile_pages(g, 2), shape=(g.rows, g.width))
        for g in grids
    ]
    text = torch.randn(20, C)
    got = FusionScorer(model).score(QuestionPages(text=text, images=images))
    assert got.shape == (sum(len(i.pages) for i in images),)
    seen = fusion_view(text, images)
    assert (seen.num_text_pages, seen.num_image_pages) == (2, len(got))
    assert seen.image_page[16:].tolist() == [4 + page for place in range(8) for page, own in enumerate(images[1].pages) if place in own]  # fmt: skip
    torch.testing.assert_close(got, model.density(seen)[2:])
