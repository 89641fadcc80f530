"""Budgets and the ways to score image pages: baselines and controls."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from oval_core.errors import ConfigError
from oval_mm.budget import ImageBudget, choose_pages
from oval_mm.downsampling import downsampled, downsampled_side
from oval_mm.page_choice import (
    ClipScorer,
    FeatureNormScorer,
    ImagePages,
    KeyMeanScorer,
    QuestionPages,
    RandomScorer,
    UniformScorer,
    create_scorer,
)
from oval_mm.spans import Grid
from oval_mm.tiles import tile_pages

pages_of = st.lists(
    st.tuples(st.integers(1, 32), st.integers(0, 3), st.floats(-5, 5, width=32)), min_size=1, max_size=24
)  # fmt: skip


def image(rows: int = 8, cols: int = 8, tile: int = 2, seed: int = 0, size: int = 6) -> ImagePages:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(rows * cols, size, generator=generator)
    return ImagePages(features=features, pages=tile_pages(Grid(rows, cols), tile), shape=(rows, cols))  # fmt: skip


def row(*images: ImagePages, seed: int = 9) -> QuestionPages:
    text = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
    return QuestionPages(text=text, images=images)


@given(pages_of, st.floats(0, 1), st.integers(0, 2))
def test_choice_keeps_within_the_budget_and_spends_it(
    pages: list[tuple[int, int, float]], share: float, floor: int
) -> None:
    sizes, images = [p[0] for p in pages], [p[1] for p in pages]
    scores = torch.tensor([p[2] for p in pages])
    budget = ImageBudget(share=share, pages_per_image=floor)
    chosen = choose_pages(scores, sizes, images, budget).tolist()
    limit = budget.limit(sum(sizes))
    used = sum(size for size, kept in zip(sizes, chosen, strict=True) if kept)
    order = sorted(range(len(pages)), key=lambda i: -float(scores[i]))
    owed = {i for n in set(images) for i in [j for j in order if images[j] == n][:floor]}
    if limit == 0:
        assert used == 0
        return
    assert {i for i in owed if not chosen[i]} == set()
    assert used <= max(limit, sum(sizes[i] for i in owed))
    for i in range(len(pages)):
        if not chosen[i]:  # whatever was left out did not fit
            assert used + sizes[i] > limit


@given(pages_of)
def test_a_whole_budget_reads_everything(pages: list[tuple[int, int, float]]) -> None:
    sizes, images = [p[0] for p in pages], [p[1] for p in pages]
    scores = torch.tensor([p[2] for p in pages])
    for budget in (ImageBudget(share=1.0), ImageBudget(tokens=sum(sizes))):
        assert bool(choose_pages(scores, sizes, images, budget).all())


def test_the_best_pages_are_read_first() -> None:
    scores = torch.tensor([0.1, 0.9, 0.5, 0.7])
    got = choose_pages(scores, [4, 4, 4, 4], [0, 0, 0, 1], ImageBudget(tokens=8))
    assert got.tolist() == [False, True, False, True]  # image 1 has one page in any case
    got = choose_pages(scores, [4, 4, 4, 4], [0, 0, 0, 1], ImageBudget(tokens=12))
    assert got.tolist() == [False, True, True, True]
    got = choose_pages(torch.tensor([0.9, 0.8, 0.1]), [9, 3, 1], [0, 0, 0], ImageBudget(tokens=4, pages_per_image=0))  # fmt: skip
    assert got.tolist() == [False, True, True]  # the large one is passed over


def test_shares_are_not_spoilt_by_rounding() -> None:
    assert [ImageBudget(share=s).limit(100) for s in (0.07, 0.29, 0.57, 1.0)] == [7, 29, 57, 100]
    assert ImageBudget(tokens=30).limit(20) == 20
    assert ImageBudget(share=0.999).limit(100) == 99


@pytest.mark.parametrize(
    "wrong", [{}, {"share": 0.5, "tokens": 3}, {"share": 1.5}, {"share": True}, {"tokens": -1}]
)
def test_wrong_budgets_are_told(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        ImageBudget(**wrong)  # type: ignore[arg-type]


def test_random_is_seeded_and_differs_by_question_and_picture() -> None:
    first = RandomScorer(1).score(row(image(), image()))
    assert torch.equal(first, RandomScorer(1).score(row(image(), image())))
    others = [
        RandomScorer(2).score(row(image(), image())),
        RandomScorer(1).score(row(image(), image(), seed=3)),
        RandomScorer(1).score(row(image(seed=4), image())),
    ]
    assert all(not torch.equal(first, other) for other in others)
    assert not torch.equal(first[:16], first[16:])


def test_uniform_is_spread_evenly_at_every_budget() -> None:
    scores = UniformScorer().score(row(image(24, 24, 4), image(24, 24, 4)))
    assert torch.equal(scores[:36], scores[36:])  # images share alike
    assert sorted(scores[:36].tolist()) == [-float(i) for i in range(35, -1, -1)]
    for count in (4, 9, 12, 18):
        chosen = [divmod(int(i), 6) for i in scores[:36].topk(count).indices]
        for half in (lambda r, c: r < 3, lambda r, c: c < 3):
            assert abs(sum(half(*at) for at in chosen) - count / 2) <= 2
        gaps = [
            min((r - y) ** 2 + (c - x) ** 2 for y, x in chosen) for r in range(6) for c in range(6)
        ]
        assert max(gaps) <= 2 * (36 / count)  # nothing is far from what is read


def test_baselines() -> None:
    pictured = image()
    features = pictured.features.clone()
    features[list(pictured.pages[3])] *= 10
    loud = ImagePages(features=features, pages=pictured.pages, shape=pictured.shape)
    assert int(FeatureNormScorer().score(row(loud)).argmax()) == 3
    asked = row(loud)
    features[list(pictured.pages[5])] = asked.text.mean(0)
    assert int(KeyMeanScorer().score(asked).argmax()) == 5


def test_clip_scores_are_cosines() -> None:
    first, second = torch.randn(16, 7), torch.randn(4, 7)
    images = [
        ImagePages(features=torch.zeros(n, 6), pages=pages, shape=shape, clip=clip)
        for n, pages, shape, clip in (
            (64, tile_pages(Grid(8, 8), 2), (8, 8), first),
            (16, tile_pages(Grid(4, 4), 2), (4, 4), second),
        )
    ]
    question = torch.randn(7)
    got = ClipScorer().score(QuestionPages(text=torch.zeros(1, 6), images=images, question=question))  # fmt: skip
    want = [float(v @ question / v.norm() / question.norm()) for v in torch.cat([first, second])]
    torch.testing.assert_close(got, torch.tensor(want))


def test_scorers_by_name(tmp_path: object) -> None:
    def load(folder: str) -> None:
        raise AssertionError(folder)

    for name in ("clip", "feature-norm", "key-mean", "random", "uniform"):
        assert create_scorer(name, load_router=load).name == name
    with pytest.raises(ConfigError, match="random"):
        create_scorer("randon", load_router=load)
    with pytest.raises(AssertionError, match="a/folder"):
        create_scorer("a/folder", load_router=load)


def test_downsampling_keeps_what_so_many_tokens_can_carry() -> None:
    assert [downsampled_side(336, 14, s) for s in (1.0, 0.5, 0.33, 0.25, 0.11)] == [336, 224, 182, 168, 98]  # fmt: skip
    for share in (0.5, 0.33, 0.11):
        kept = downsampled_side(336, 14, share) // 14
        assert kept**2 <= share * 24 * 24 < (kept + 1) ** 2
    board = Image.new("L", (48, 48))
    board.putdata([255 * ((x + y) % 2) for y in range(48) for x in range(48)])
    assert downsampled(board, 48, 6, 1.0) is board
    blurred = downsampled(board, 48, 6, 0.25)
    assert blurred.size == board.size
    low, high = blurred.getextrema()
    assert high - low < 60  # the finest detail is gone
    halves = Image.new("L", (96, 96))
    halves.paste(255, (0, 0, 48, 96))
    kept = downsampled(halves, 48, 6, 0.25)
    assert kept.getpixel((10, 50)) > 240
    assert kept.getpixel((86, 50)) < 15
