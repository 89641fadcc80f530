"""Questions that share a picture never judge what learnt from it, and records give scorers the row back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oval_core.errors import ConfigError
from oval_mm.fusion_clip import ClipSample
from oval_mm.fusion_recall import question_pages, recall_table
from oval_mm.fusion_split import split_by_picture
from oval_mm.fusion_training import FusionRecord
from oval_mm.page_choice import (
    ClipScorer,
    ImagePages,
    KeyMeanScorer,
    QuestionPages,
    UniformScorer,
    fusion_view,
)

NAMES = st.lists(st.lists(st.sampled_from("abcdefghij"), max_size=3), min_size=2, max_size=14)


@given(pictures=NAMES, share=st.floats(0.05, 0.95), seed=st.integers(0, 9))
def test_no_picture_is_on_both_sides(pictures: list[list[str]], share: float, seed: int) -> None:
    try:
        train, held = split_by_picture(pictures, share, seed)
    except ConfigError:
        joined = set(pictures[0])
        for _ in pictures:
            joined |= {n for own in pictures if joined & set(own) for n in own}
        assert all(joined & set(own) for own in pictures)
        return
    assert sorted(train + held) == list(range(len(pictures)))
    assert train
    assert held
    sides = [{name for i in side for name in pictures[i]} for side in (train, held)]
    assert not sides[0] & sides[1]
    assert (train, held) == split_by_picture(pictures, share, seed)


def test_a_chain_of_pictures_stays_together() -> None:
    chain = [["a", "b"], ["b", "c"], ["x"], ["c"], ["y"], ["z"]]
    for seed in range(6):
        train, held = split_by_picture(chain, 0.3, seed)
        assert not {0, 1, 3} & set(held), seed  # three of six are more than the share
        assert len(held) == 2
    with pytest.raises(ConfigError, match="share pictures"):
        split_by_picture([["a"], ["a", "b"], ["b"]], 0.3, 0)


def row(seed: int) -> tuple[QuestionPages, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tiles = [[0, 1, 4, 5], [2, 3, 6, 7]]
    images = [
        ImagePages(features=torch.randn(8, 6, generator=generator), pages=tiles, shape=(2, 4), clip=torch.randn(2, 5, generator=generator)),
        ImagePages(features=torch.randn(4, 6, generator=generator), pages=[[0, 1, 2, 3]], shape=(2, 2), clip=torch.randn(1, 5, generator=generator)),
    ]  # fmt: skip
    text = torch.randn(5, 6, generator=generator)
    asked = QuestionPages(text=text, images=images, question=torch.randn(5, generator=generator))
    return asked, torch.rand(4, generator=generator)


def recorded(seed: int) -> tuple[QuestionPages, FusionRecord, ClipSample]:
    asked, mass = row(seed)
    view = fusion_view(asked.text, asked.images)
    record = FusionRecord(view=view, mass=mass, shapes=tuple(i.shape for i in asked.images))
    clip = torch.cat([i.clip for i in asked.images if i.clip is not None])
    assert asked.question is not None
    return asked, record, ClipSample(view=view, question=asked.question, pages=clip)


def test_a_record_gives_the_row_back() -> None:
    asked, record, sample = recorded(3)
    again = question_pages(record, sample)
    assert [i.pages for i in again.images] == [i.pages for i in asked.images]
    for scorer in (ClipScorer(), KeyMeanScorer(), UniformScorer()):
        assert torch.equal(scorer.score(again), scorer.score(asked)), scorer.name


def test_recall_of_scorers_by_hand() -> None:
    asked, record, sample = recorded(4)
    scorers = {"clip": ClipScorer(), "uniform": UniformScorer()}
    small, large = recall_table(scorers, [(record, sample)], (0.34, 1.0))
    mass = record.mass[1:]
    best = int(ClipScorer().score(asked).argmax())
    assert small["clip"] == pytest.approx(float(mass[best] / mass.sum()))
    assert small["oracle"] == pytest.approx(float(mass.max() / mass.sum()))
    assert small["random"] == pytest.approx(1 / 3)
    assert [large[name] for name in ("clip", "uniform", "oracle", "random")] == pytest.approx([1] * 4)  # fmt: skip
    assert "clip" not in recall_table(scorers, [(record, None)], (0.5,))[0]
