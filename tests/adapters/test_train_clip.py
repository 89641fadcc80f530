"""`oval train clip` on a tiny model: it learns, goes on as if never stopped, and open_clip and OVAL load what it saves."""

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_scenes import save_cutouts
from typer.testing import CliRunner, Result

from oval_adapters.cli.app import create_app
from oval_adapters.clip.load import load_clip
from oval_adapters.training import clip_model
from oval_adapters.training.clip_model import CONFIG_NAME, WEIGHTS_NAME
from oval_adapters.training.clip_run import RECORD_NAME, ClipReport, train_and_save_clip
from oval_adapters.training.clip_settings import ClipTraining
from oval_adapters.training.resumable_loop import CHECKPOINT_NAME, TrainingStopped
from oval_core.errors import ConfigError
from oval_mm.scenes import Library, draw
from oval_mm.spans import Grid
from oval_mm.tiles import tile_pages

needs_open_clip = pytest.mark.skipif(
    clip_model.importlib.util.find_spec("open_clip") is None, reason="needs open-clip-torch"
)
SHAPE = {"image_size": 28, "width": 32, "layers": 2, "text_width": 32, "text_layers": 1, "embed_dim": 24}  # fmt: skip


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_cutouts(tmp_path_factory.mktemp("train a tiny clip") / "cut-outs"))


def settings(pictures: str, out: Path, **changes: object) -> ClipTraining:
    values: dict[str, Any] = {
        "pictures": (pictures,),
        "out": str(out),
        "steps": 6,
        "context_length": 32,
        "batch": 8,
        "rate": 3e-3,
        "validation": 12,
        "validate_every": 3,
        "save_every": 100,
    }
    return ClipTraining(**(values | SHAPE | changes))


def train(own: ClipTraining, stop_at: int | None = None) -> ClipReport:
    """Trains; with `stop_at`, Ctrl-C comes when so many updates are done."""

    def tick(label: str, done: int, total: int) -> None:
        if stop_at is not None and label.startswith("training") and done == stop_at:
            signal.raise_signal(signal.SIGINT)

    # Python's own handler: where tests run in the background, their shell had SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return train_and_save_clip(own, tick)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def learnt(pictures: str, tmp_path_factory: pytest.TempPathFactory) -> ClipReport:
    """A training that is long enough for a loss below that of guessing."""
    out = tmp_path_factory.mktemp("learnt")
    own = settings(pictures, out, steps=80, batch=16, validate_every=40, validation=24, sources=("drawn here, CC0",))  # fmt: skip
    return train(own)


@needs_open_clip
def test_a_training_that_was_stopped_goes_on_as_if_it_never_was(
    pictures: str, tmp_path: Path
) -> None:
    whole = train(settings(pictures, tmp_path / "whole"))
    with pytest.raises(TrainingStopped):
        train(settings(pictures, tmp_path / "parts"), stop_at=4)
    assert not (tmp_path / "parts" / WEIGHTS_NAME).exists()
    parts = train(settings(pictures, tmp_path / "parts"))
    assert (whole.resumed_at, parts.resumed_at, parts.updates) == (0, 4, 6)
    one, other = (load_file(tmp_path / name / WEIGHTS_NAME) for name in ("whole", "parts"))
    assert set(one) == set(other)
    assert all(torch.equal(one[name], other[name]) for name in one)
    timeless = [[{k: v for k, v in entry.items() if k != "seconds"} for entry in report.curve] for report in (whole, parts)]  # fmt: skip
    assert timeless[0] == timeless[1]
    again = train(settings(pictures, tmp_path / "parts"))
    assert (again.resumed_at, again.pairs_per_s) == (6, 0.0)


@needs_open_clip
def test_it_learns_and_the_record_is_whole(learnt: ClipReport) -> None:
    first, last = learnt.curve
    assert last["loss"] < first["loss"]
    assert last["loss"] < math.log(16) - 0.05  # nats: what guessing among a batch of 16 costs
    for sort in ("scenes", "naming"):
        known = last["known"][sort]
        assert (known["pairs"], known["chance"]) == (24, 1 / 24)
    assert last["never_seen"]["naming"]["pairs"] == min(24, learnt.never_seen_names)
    out = Path(learnt.out)
    record = json.loads((out / RECORD_NAME).read_text(encoding="utf-8"))
    assert record["sources"] == ["drawn here, CC0"]
    assert record["settings"]["pictures"] == ["cut-outs"]  # no place of this machine
    assert str(out.parent) not in (out / RECORD_NAME).read_text(encoding="utf-8")
    assert record["versions"]["open_clip_torch"]
    logged = [json.loads(line) for line in (out / "training.jsonl").read_text(encoding="utf-8").splitlines()]  # fmt: skip
    assert logged == record["curve"] == learnt.curve


@needs_open_clip
def test_open_clip_itself_loads_the_folder(pictures: str, learnt: ClipReport) -> None:
    import open_clip

    name = f"local-dir:{learnt.out}"
    model, preprocess = open_clip.create_model_from_pretrained(name)
    tokenizer = open_clip.get_tokenizer(name)
    saved = load_file(Path(learnt.out) / WEIGHTS_NAME)
    assert {key: value.shape for key, value in model.state_dict().items()} == {key: value.shape for key, value in saved.items()}  # fmt: skip
    assert all(torch.equal(value, saved[key]) for key, value in model.state_dict().items())
    assert tokenizer(["a cat"]).shape == (1, 32)
    # the curve's last figures, by open_clip alone
    own = settings(pictures, Path(learnt.out), validation=24)
    library = Library([pictures])
    pairs = clip_pairs(library, own)
    with torch.no_grad():
        pixels = torch.stack([preprocess(draw(pair.scene, library, 28)) for pair in pairs])
        seen = model.encode_image(pixels, normalize=True)
        said = model.encode_text(tokenizer([pair.caption for pair in pairs]), normalize=True)
    hits = (seen @ said.T).argmax(1) == torch.arange(24)
    assert hits.float().mean().item() == learnt.curve[-1]["known"]["scenes"]["top1"]


def clip_pairs(library: Library, own: ClipTraining) -> list[Any]:
    from oval_adapters.training.clip_lessons import scene_pairs

    return scene_pairs(library, own, held_out=False)


@needs_open_clip
def test_oval_loads_the_folder_for_page_embeddings(learnt: ClipReport) -> None:
    clip = load_clip(learnt.out)
    assert (clip.dim, clip.patch_grid, clip.pixels.size) == (24, (2, 2), (28, 28))
    pixels = torch.randn(2, 3, 28, 28)
    grid = Grid(2, 2)
    regions = clip.embed_regions(clip.hidden_of(pixels), grid, tile_pages(grid, 1))
    assert regions.shape == (2, 4, 24)
    torch.testing.assert_close(regions.norm(dim=-1), torch.ones(2, 4))
    long = " ".join(["a badock and a kelam"] * 20)  # more than the tower's places
    said = clip.embed_text(["a badock", long])
    assert said.shape == (2, 24)
    named = load_clip(f"open_clip:local-dir:{learnt.out}")
    torch.testing.assert_close(named.embed_text(["a badock", long]), said)


@needs_open_clip
def test_time_ends_it_too(pictures: str, tmp_path: Path) -> None:
    report = train(settings(pictures, tmp_path, steps=None, minutes=0.01, validate_every=1000))
    assert report.updates >= 1
    assert report.minutes >= 0.01


@needs_open_clip
def test_other_settings_and_damage_are_refused(pictures: str, tmp_path: Path) -> None:
    train(settings(pictures, tmp_path, steps=1))
    with pytest.raises(ConfigError, match=r"other settings \(batch, seed\)"):
        train(settings(pictures, tmp_path, steps=1, seed=3, batch=4))
    (tmp_path / CHECKPOINT_NAME).write_bytes(b"cut off")
    with pytest.raises(ConfigError, match="cannot be gone on from"):
        train(settings(pictures, tmp_path, steps=1))
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot make the folder"):
        train(settings(pictures, tmp_path / "file"))
    with pytest.raises(ConfigError, match="no such folder"):
        train(settings(str(tmp_path / "nothing"), tmp_path / "new"))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"minutes": 1.0}, "steps: got steps 6 and minutes 1.0"),
        ({"steps": None}, "steps: got steps None and minutes None"),
        ({"steps": None, "minutes": 0.0}, "minutes: got 0.0"),
        ({"pictures": ()}, "pictures: got none"),
        ({"batch": 1}, "batch: got 1"),
        ({"image_size": 30}, "image_size: got 30 with patches of 14"),
        ({"width": 48}, "width: got 48"),
        ({"text_width": 16}, "text_width: got 16"),
        ({"validation": 1000}, "validation: got 1000"),
        ({"rate": float("nan")}, "rate: got nan"),
        ({"weight_decay": -0.1}, "weight_decay: got -0.1"),
        ({"alike": 1.5}, "alike: got 1.5"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, changes: dict[str, object], problem: str) -> None:
    values = {"pictures": ("p",), "out": str(tmp_path), "steps": 6}
    with pytest.raises(ConfigError, match=problem):
        ClipTraining(**(values | changes))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(create_app(), [str(argument) for argument in arguments])


def test_the_missing_library_is_named(
    pictures: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clip_model.importlib.util, "find_spec", lambda name: None)
    result = run("train", "clip", "--pictures", pictures, "--steps", 1, "--out", tmp_path / "new")
    assert result.exit_code == 2
    assert "got no open_clip" in result.output
    assert "oval-pack[clip]" in result.output
    assert not (tmp_path / "new").exists()


@needs_open_clip
def test_the_command_trains_and_reports(pictures: str, tmp_path: Path) -> None:
    shape = [word for key, value in SHAPE.items() for word in (f"--{key.replace('_', '-')}", value)]
    common = ("train", "clip", "--pictures", pictures, *shape, "--batch", 4, "--validation", 4, "--out", tmp_path / "c")  # fmt: skip
    first = run(*common, "--steps", 2, "--json", "--source", "mine, CC0")
    assert first.exit_code == 0, first.output
    result = json.loads(first.stdout.splitlines()[-1])
    assert (result["updates"], result["resumed_at"], result["sources"]) == (2, 0, ["mine, CC0"])
    assert result["settings"]["image_size"] == 28
    again = run(*common, "--steps", 2)
    assert again.exit_code == 0, again.output
    assert "2 of them in an earlier run" in again.stdout
    assert f"vision.clip: {tmp_path / 'c'}" in again.stdout
    config = json.loads((tmp_path / "c" / CONFIG_NAME).read_text(encoding="utf-8"))
    assert config["model_cfg"]["vision_cfg"]["width"] == 32
    bad = run(*common, "--steps", 2, "--minutes", 1)
    assert bad.exit_code == 2
    assert "error: steps: got steps 2 and minutes 1.0" in bad.output
