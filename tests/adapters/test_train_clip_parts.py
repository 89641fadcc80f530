"""Lessons, model and retrieval of `oval train clip`, each against the plain way."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_scenes import save_cutouts

from oval_adapters.training.clip_lessons import naming_pairs, pairs_at, scene_pairs
from oval_adapters.training.clip_loop import _groups, retrieval
from oval_adapters.training.clip_model import create_clip
from oval_adapters.training.clip_settings import ClipTraining
from oval_adapters.training.resumable_loop import LEAST_RATE, rate_share
from oval_mm.scenes import Library, draw, make_scene


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library([save_cutouts(tmp_path_factory.mktemp("scenes of a clip"))])


def settings(**changes: object) -> ClipTraining:
    values = {"pictures": ("p",), "out": "o", "steps": 8, "batch": 12, "validation": 40}
    shape = {"image_size": 28, "width": 32, "layers": 1, "text_width": 32, "text_layers": 1, "embed_dim": 8}  # fmt: skip
    return ClipTraining(**(values | shape | changes))


def test_lessons_follow_from_seed_and_number(library: Library) -> None:
    own = settings()
    assert pairs_at(library, own, 3) == pairs_at(library, own, 3)
    assert pairs_at(library, own, 3) != pairs_at(library, own, 4)
    assert pairs_at(library, own, 3) != pairs_at(library, settings(seed=1), 3)
    assert pairs_at(library, own, 3) == pairs_at(library, replace(own, out="elsewhere"), 3)


def test_pictures_that_are_alike_differ_in_things_alone(library: Library) -> None:
    for update in range(6):
        pairs = pairs_at(library, settings(alike=1.0), update)
        assert len({pair.scene.kind for pair in pairs}) == 1
        assert len({pair.scene.ground for pair in pairs}) == 1
        assert len({pair.scene.names for pair in pairs}) == len(pairs) == 12
        assert all(pair.scene.colour in pair.caption for pair in pairs if "background" in pair.caption)  # fmt: skip
    assert len({pair.scene.kind for pair in pairs_at(library, settings(alike=0.0), 0)}) > 1


def test_no_lesson_holds_what_is_held_out(library: Library) -> None:
    held = library.names(True)
    pairs = [pair for update in range(40) for pair in pairs_at(library, settings(), update)]
    assert held
    assert not any(one.cutout.is_held_out for pair in pairs for one in pair.scene.placed)
    assert not [pair.caption for pair in pairs if set(held) & set(pair.caption.replace(",", " ").split())]  # fmt: skip


@pytest.mark.parametrize("held_out", [False, True])
def test_checks_are_of_one_part_and_differ(library: Library, held_out: bool) -> None:
    own = settings()
    scenes, names = (make(library, own, held_out=held_out) for make in (scene_pairs, naming_pairs))
    assert len(scenes) == 40
    assert len({pair.caption for pair in scenes}) == 40
    assert all("background" in pair.caption for pair in scenes)
    assert len(names) == min(40, len(library.names(held_out)))
    assert len({pair.caption for pair in names}) == len(names)
    assert {pair.caption for pair in names} <= set(library.names(held_out))
    assert all(one.cutout.is_held_out is held_out for pair in scenes + names for one in pair.scene.placed)  # fmt: skip
    seen = {draw(pair.scene, library, 32).tobytes() for update in range(8) for pair in pairs_at(library, own, update)}  # fmt: skip
    assert not seen & {draw(pair.scene, library, 32).tobytes() for pair in scenes + names}


def test_retrieval_is_what_a_slow_search_finds() -> None:
    generator = torch.Generator().manual_seed(3)
    said = torch.nn.functional.normalize(torch.randn(20, 6, generator=generator), dim=1)
    seen = torch.nn.functional.normalize(said + 0.6 * torch.randn(20, 6, generator=generator), dim=1)  # fmt: skip
    forward = sum(max(range(20), key=lambda c: float(seen[p] @ said[c])) == p for p in range(20))
    backward = sum(max(range(20), key=lambda p: float(seen[p] @ said[c])) == c for c in range(20))
    found = retrieval(seen, said)
    assert 0 < forward < 20
    assert forward != backward  # else a transposed search would pass
    assert found["top1"] == pytest.approx(forward / 20)
    assert found["picture_top1"] == pytest.approx(backward / 20)
    assert (found["pairs"], found["chance"]) == (20, 0.05)


def test_a_new_model_follows_from_its_seed(library: Library, tmp_path: Path) -> None:
    pytest.importorskip("open_clip")
    state = torch.get_rng_state()
    one, other = create_clip(settings()), create_clip(settings(seed=1))
    assert torch.equal(torch.get_rng_state(), state)
    again = create_clip(settings())
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), again.model.parameters(), strict=True))  # fmt: skip
    assert not torch.equal(one.model.token_embedding.weight, other.model.token_embedding.weight)
    pictures = [draw(make_scene(library, "two", random.Random(i)), library, 28) for i in range(3)]
    seen = one.pictures(pictures)
    assert seen.shape == (3, 8)
    torch.testing.assert_close(seen.norm(dim=1), torch.ones(3))
    assert one.num_parameters == sum(p.numel() for p in one.model.parameters())


def test_matrices_decay_and_embeddings_do_not() -> None:
    pytest.importorskip("open_clip")
    model = create_clip(settings()).model
    decayed, spared = ({id(p) for p in group["params"]} for group in _groups(model, 0.3))
    named = dict(model.named_parameters())
    assert decayed | spared == {id(p) for p in named.values()}
    assert not decayed & spared
    assert id(named["visual.proj"]) in decayed
    assert id(named["visual.transformer.resblocks.0.attn.in_proj_weight"]) in decayed
    for name in ("token_embedding.weight", "visual.positional_embedding", "visual.class_embedding", "logit_scale", "ln_final.weight"):  # fmt: skip
        assert id(named[name]) in spared


def test_the_rate_rises_then_falls() -> None:
    shares = [rate_share(done, done / 200) for done in range(200)]
    assert shares.index(max(shares)) in (18, 19, 20)
    assert shares[0] == pytest.approx(0.05, abs=0.001)
    assert LEAST_RATE < shares[-1] < LEAST_RATE + 0.01
    assert rate_share(500, 2.0) == pytest.approx(LEAST_RATE)
