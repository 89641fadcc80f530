"""`oval train projector` and `oval train llava` on tiny models: they learn, go on as if never stopped, and report."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tiny_scenes import save_cutouts, save_decoder, save_tower
from typer.testing import CliRunner, Result

from oval_adapters.cli.app import create_app
from oval_adapters.models.llava_weights import CONFIG_NAME, WEIGHTS_NAME, load_llava_weights
from oval_adapters.training.llava_run import load_learner, train_and_save_llava
from oval_adapters.training.llava_settings import LlavaTraining
from oval_adapters.training.resumable_loop import CHECKPOINT_NAME, TrainingStopped
from oval_core.errors import ConfigError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("train a tiny llava")
    return SimpleNamespace(
        decoder=str(save_decoder(folder / "decoder")),
        tower=str(save_tower(folder / "tower")),
        pictures=str(save_cutouts(folder / "cut-outs")),
    )


def settings(tiny: SimpleNamespace, out: Path, **changes: object) -> LlavaTraining:
    values: dict[str, object] = {
        "stage": "llava",
        "pictures": (tiny.pictures,),
        "out": str(out),
        "model": tiny.decoder,
        "vision": tiny.tower,
        "steps": 8,
        "align_pictures": 24,
        "align_updates": 10,
        "scenes": 24,
        "batch": 1,
        "questions": 2,
        "rank": 4,
        "albums": 0.3,
        "album": 4,
        "lora_rate": 1e-2,
        "projector_rate": 1e-2,
        "validation": 1,
        "validate_every": 4,
        "save_every": 100,
    }
    return LlavaTraining(**(values | changes))


def train(own: LlavaTraining, stop_at: int | None = None) -> object:
    """Trains; with `stop_at`, Ctrl-C comes when so many updates are done."""

    def tick(label: str, done: int, total: int) -> None:
        if stop_at is not None and label.startswith("training") and done == stop_at:
            signal.raise_signal(signal.SIGINT)

    # Python's own handler: where tests run in the background, their shell had SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return train_and_save_llava(load_learner(own), own, tick)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_training_that_was_stopped_goes_on_as_if_it_never_was(
    tiny: SimpleNamespace, tmp_path: Path
) -> None:
    whole = train(settings(tiny, tmp_path / "whole"))
    with pytest.raises(TrainingStopped):
        train(settings(tiny, tmp_path / "parts"), stop_at=5)
    assert not (tmp_path / "parts" / WEIGHTS_NAME).exists()
    parts = train(settings(tiny, tmp_path / "parts"))
    assert (whole.resumed_at, parts.resumed_at, parts.updates) == (0, 5, 8)
    one, other = (load_file(tmp_path / name / WEIGHTS_NAME) for name in ("whole", "parts"))
    assert set(one) == set(other)
    assert all(torch.equal(one[name], other[name]) for name in one)
    timeless = [[{k: v for k, v in entry.items() if k != "seconds"} for entry in report.curve] for report in (whole, parts)]  # fmt: skip
    assert timeless[0] == timeless[1]
    again = train(settings(tiny, tmp_path / "parts"))
    assert (again.resumed_at, again.questions_per_s) == (8, 0.0)


def test_the_loss_falls_and_the_record_is_whole(tiny: SimpleNamespace, tmp_path: Path) -> None:
    own = settings(tiny, tmp_path, steps=30, validate_every=10, albums=0.1, sources=("drawn here, CC0",))  # fmt: skip
    report = train(own)
    losses = [entry["loss"] for entry in report.curve]
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < losses[0] - 0.4  # nats, of 5.6 where nothing is learnt
    weights = load_llava_weights(tmp_path)
    assert weights.training["sources"] == ["drawn here, CC0"]
    assert weights.training["settings"]["seed"] == 0
    assert weights.training["updates"] == 30
    assert weights.training["settings"]["pictures"] == ["cut-outs"]  # no place of this machine
    assert str(tmp_path) not in (tmp_path / CONFIG_NAME).read_text(encoding="utf-8")
    assert weights.side == 28
    assert len(weights.lora) == 2 * 4 * 2
    assert report.curve[-1]["updates"] == 30
    assert report.curve[-1]["known"]["questions"] == 5
    logged = [json.loads(line) for line in (tmp_path / "training.jsonl").read_text(encoding="utf-8").splitlines()]  # fmt: skip
    assert logged == report.curve


def test_a_projector_is_where_a_llava_goes_on_from(tiny: SimpleNamespace, tmp_path: Path) -> None:
    first = train(settings(tiny, tmp_path / "a", stage="projector", steps=3))
    assert first.align["pictures"] == 24
    projector = load_llava_weights(tmp_path / "a")
    assert projector.lora == {}
    report = train(settings(tiny, tmp_path / "b", init=str(tmp_path / "a"), steps=1, lora_rate=1e-9, projector_rate=1e-9))  # fmt: skip
    assert report.align is None
    after = load_llava_weights(tmp_path / "b")
    for name, tensor in projector.projector.items():
        torch.testing.assert_close(after.projector[name].float(), tensor.float(), rtol=0.02, atol=0.02)  # fmt: skip
    assert len(after.lora) == 16


def test_time_ends_it_too(tiny: SimpleNamespace, tmp_path: Path) -> None:
    report = train(settings(tiny, tmp_path, steps=None, minutes=0.02, validate_every=1000))
    assert report.updates >= 1
    assert report.minutes >= 0.02


def test_other_settings_and_damage_are_refused(tiny: SimpleNamespace, tmp_path: Path) -> None:
    train(settings(tiny, tmp_path, steps=1))
    with pytest.raises(ConfigError, match=r"other settings \(batch, seed\)"):
        train(settings(tiny, tmp_path, steps=1, seed=3, batch=2))
    (tmp_path / CHECKPOINT_NAME).write_bytes(b"cut off")
    with pytest.raises(ConfigError, match="cannot be gone on from"):
        train(settings(tiny, tmp_path, steps=1))
    with pytest.raises(ConfigError, match="holds no trained projector"):
        train(settings(tiny, tmp_path / "new", init=str(tmp_path / "nothing")))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"stage": "both"}, "stage: got 'both'"),
        ({"minutes": 1.0}, "steps: got steps 8 and minutes 1.0"),
        ({"steps": None}, "steps: got steps None and minutes None"),
        ({"pictures": ()}, "pictures: got none"),
        ({"choice_answer": "number"}, "choice_answer: got 'number'"),
        ({"lora_rate": 0.0}, "lora_rate: got 0.0"),
        ({"albums": 2.0}, "albums: got 2.0"),
        ({"questions": 1}, "questions: got 1"),
    ],
)
def test_bad_settings_are_named(
    tiny: SimpleNamespace, tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        settings(tiny, tmp_path, **changes)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(create_app(), [str(argument) for argument in arguments])


def test_the_command_trains_and_reports(tiny: SimpleNamespace, tmp_path: Path) -> None:
    common = ("--pictures", tiny.pictures, "--model", tiny.decoder, "--vision", tiny.tower, "--steps", 2, "--align-pictures", 8)  # fmt: skip
    common += (
        "--align-updates",
        2,
        "--scenes",
        8,
        "--batch",
        1,
        "--questions",
        2,
        "--validation",
        1,
    )
    first = run("train", "projector", *common, "--out", tmp_path / "p", "--json")
    assert first.exit_code == 0, first.output
    result = json.loads(first.stdout.splitlines()[-1])
    assert (result["stage"], result["updates"], result["resumed_at"]) == ("projector", 2, 0)
    second = run("train", "llava", *common, "--out", tmp_path / "l", "--init", tmp_path / "p", "--rank", 4, "--source", "mine, CC0")  # fmt: skip
    assert second.exit_code == 0, second.output
    assert "saved to" in second.stdout
    assert load_llava_weights(tmp_path / "l").training["sources"] == ["mine, CC0"]
    bad = run("train", "llava", *common, "--minutes", 1, "--out", tmp_path / "l")
    assert bad.exit_code == 2
    assert "error: steps: got steps 2 and minutes 1.0" in bad.output
