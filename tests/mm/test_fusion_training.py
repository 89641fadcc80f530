"""Training of the fusion router: it learns a rule, can be cut off and gone on with, and says what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from oval_core.errors import ConfigError
from oval_mm.fusion_router import FusionConfig, FusionRouter, FusionView
from oval_mm.fusion_training import (
    FusionRecord,
    FusionTraining,
    image_recall,
    oracle_recall,
    train_fusion,
)

C = 12


def records(count: int, seed: int) -> list[FusionRecord]:
    """The first token of the text names a colour; pages of that colour get most of the attention."""
    generator = torch.Generator().manual_seed(7)
    words, colours = torch.randn(2, 4, C, generator=generator) * 2
    generator.manual_seed(seed)
    made = []
    for _ in range(count):
        wanted = int(torch.randint(4, (), generator=generator))
        page_colour = torch.randperm(8, generator=generator) % 4
        image = colours[page_colour].repeat_interleave(3, 0)
        image = image + 0.5 * torch.randn(image.shape, generator=generator)
        text = torch.cat([words[wanted][None], torch.randn(3, C, generator=generator)])
        mass = torch.where(page_colour == wanted, 0.2, 0.02)
        seen = FusionView(
            text=text, image=image, text_page=torch.zeros(4, dtype=torch.long), image_page=torch.arange(24) // 3
        )  # fmt: skip
        made.append(FusionRecord(view=seen, mass=torch.cat([torch.tensor([0.4]), mass])))
    return made


def router(seed: int = 0) -> FusionRouter:
    torch.manual_seed(seed)
    return FusionRouter(FusionConfig(hidden_size=C, size=16, num_heads=2))


def settings(folder: Path, **changes: Any) -> FusionTraining:
    plain = {"out": str(folder), "updates": 200, "batch": 4, "save_every": 50, "budget": 0.26, "learning_rate": 1e-2}  # fmt: skip
    return FusionTraining(**{**plain, **changes})


def few(folder: Path) -> FusionTraining:
    return settings(folder, updates=40, save_every=20)


def silent(*_: object) -> None:
    """No progress is shown."""


def test_it_learns_where_the_decoder_looks(tmp_path: Path) -> None:
    tests = records(40, seed=2)
    before = image_recall(router().eval(), tests, 0.26)
    result = train_fusion(records(80, seed=1), router(), settings(tmp_path), silent)
    after, best = image_recall(result.router, tests, 0.26), oracle_recall(tests, 0.26)
    assert before < 0.6 * best
    assert after > 0.9 * best
    assert [entry["updates"] for entry in result.curve] == [0, 50, 100, 150, 200]
    assert result.curve[-1]["held_out_loss"] < result.curve[0]["held_out_loss"]
    assert not result.router.training


class CutError(Exception):
    """Stands for Ctrl-C."""


def test_a_cut_training_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    train = records(20, seed=1)
    whole = train_fusion(train, router(), few(tmp_path / "a"), silent)

    def cut(_: str, done: int, total: int) -> None:
        if done == 30:
            raise CutError

    with pytest.raises(CutError):
        train_fusion(train, router(), few(tmp_path / "b"), cut)
    rest = train_fusion(train, router(), few(tmp_path / "b"), silent)
    assert (whole.resumed_at, rest.resumed_at) == (0, 20)
    for name, weight in whole.router.state_dict().items():
        assert torch.equal(weight, rest.router.state_dict()[name]), name
    again = train_fusion(train, router(), few(tmp_path / "b"), silent)
    assert again.resumed_at == 40


@pytest.mark.parametrize("change", ["seed", "router", "records"])
def test_another_training_does_not_go_on(tmp_path: Path, change: str) -> None:
    few = settings(tmp_path, updates=2, save_every=1)
    train_fusion(records(6, seed=1), router(), few, silent)
    told = settings(tmp_path, updates=2, save_every=1, seed=5 if change == "seed" else 0)
    start = router(9 if change == "router" else 0)
    train = records(6, seed=3 if change == "records" else 1)
    assert train_fusion(train, start, told, silent).resumed_at == 0


def test_recall_by_hand() -> None:
    record = records(1, seed=4)[0]
    ranked = sorted(record.mass[1:].tolist(), reverse=True)
    want = sum(ranked[:2]) / sum(ranked)
    assert oracle_recall([record], 0.26) == pytest.approx(want)
    assert oracle_recall([record], 0.01) == pytest.approx(ranked[0] / sum(ranked))


def test_too_little_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two at least"):
        train_fusion(records(1, seed=1), router(), settings(tmp_path), silent)
    for wrong in ({"updates": 0}, {"budget": 1.0}, {"held_out": 0.0}):
        with pytest.raises(ConfigError):
            settings(tmp_path, **wrong)
