"""`oval train image-router`: it asks what `oval eval mmbench` asks, learns, goes on, and its router serves."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_llava
import tiny_models
import torch
from transformers import AutoProcessor, CLIPConfig, CLIPModel
from typer.testing import CliRunner, Result

from oval_adapters.cli.app import create_app
from oval_adapters.evaluation.mm_model import load_processor
from oval_adapters.load_model import load_model
from oval_adapters.training.image_router_record import draw_asks
from oval_adapters.training.image_router_run import (
    check_image_router,
    train_and_save_image_router,
)
from oval_adapters.training.image_router_settings import ImageRouterTraining
from oval_core.errors import ConfigError, UnsupportedModelError
from oval_mm.fusion_checkpoint import load_fusion

COLUMNS = ["index", "question", "A", "B", "answer", "image"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny_models.one_thread()


def save_clip(folder: Path, llava: Path) -> Path:
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}  # fmt: skip
    config = CLIPConfig(
        projection_dim=8,
        vision_config={**tower, "image_size": 24, "patch_size": 6},
        text_config={**tower, "vocab_size": 300, "max_position_embeddings": 12, "eos_token_id": 3},
    )
    CLIPModel(config).save_pretrained(folder)
    processor = AutoProcessor.from_pretrained(llava)
    processor.tokenizer.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("image router")
    llava = tiny_llava.save_llava(folder / "llava")
    data = folder / "tiny.tsv"
    with data.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, delimiter="\t", lineterminator="\n")
        writer.writeheader()
        for index in range(8):
            pictures = (
                tiny_llava.png_text(index // 2)
                if index < 6
                else str([tiny_llava.png_text(20 + index), tiny_llava.png_text(21)])
            )
            writer.writerow({"index": index, "question": f"What {index}?", "A": "cat", "B": "dog", "answer": "A", "image": pictures})  # fmt: skip
        writer.writerow({"index": 9, "question": "Bad?", "A": "cat", "image": "no picture" * 20})
    return SimpleNamespace(
        llava=str(llava), data=str(data), clip=str(save_clip(folder / "clip", llava))
    )


def settings(tiny: SimpleNamespace, out: Path, **changes: Any) -> ImageRouterTraining:
    plain = {"steps": 4, "tile": 1, "held_out": 0.4, "size": 16, "num_queries": 3}
    return ImageRouterTraining(
        **{"model": tiny.llava, "data": (tiny.data,), "out": str(out), **plain, **changes}
    )


def train(own: ImageRouterTraining, stop_at: str | None = None) -> Any:
    def tick(label: str, done: int, total: int) -> None:
        if label.startswith(stop_at or "-") and done == 2:
            raise KeyboardInterrupt

    asks = check_image_router(own)
    model = load_model(own.model, "float32", "cpu")
    return train_and_save_image_router(model, load_processor(own.model), own, asks, tick)


def run(tiny: SimpleNamespace, out: Path, *more: object) -> Result:
    flags = ["--model", tiny.llava, "--data", tiny.data, "--out", out, "--dtype", "float32", "--tile", 1, "--steps", 3]  # fmt: skip
    command = [str(part) for part in ("train", "image-router", *flags, *more, "--json")]
    return CliRunner().invoke(create_app(), command)


def test_the_command_trains_and_its_router_answers(tiny: SimpleNamespace, tmp_path: Path) -> None:
    done = run(tiny, tmp_path / "router", "--init", "clip", "--clip", tiny.clip)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["questions"], report["held_out"], report["updates"]) == (8, 2, 3)
    assert len(report["failed"]) == 1, "a row whose picture cannot be read stops nothing"
    assert [row["share"] for row in report["recall"]] == [0.11, 0.25, 0.33, 0.5]
    for row in report["recall"]:
        others = {name: own for name, own in row.items() if name not in ("share", "oracle")}
        assert set(others) == {"router", "start", "clip", "key-mean", "feature-norm", "uniform", "random"}  # fmt: skip
        assert all(0 < own <= row["oracle"] + 1e-6 for own in others.values())
    assert load_fusion(tmp_path / "router").training["settings"]["init"] == "clip"
    assert str(tmp_path) not in json.dumps(load_fusion(tmp_path / "router").training)
    flags = ["--model", tiny.llava, "--data", tiny.data, "--dtype", "float32", "--max-new-tokens", "2"]  # fmt: skip
    routed = ["--budget", "30%", "--router", str(tmp_path / "router"), "--json"]
    told = CliRunner().invoke(create_app(), ["eval", "mmbench", *flags, *routed])
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout.splitlines()[-1])["image_router"] == "router"


def test_a_cut_run_goes_on_with_what_was_recorded(tiny: SimpleNamespace, tmp_path: Path) -> None:
    whole = train(settings(tiny, tmp_path / "whole"))
    for stop in ("recording", "training"):
        with pytest.raises(KeyboardInterrupt):
            train(settings(tiny, tmp_path / "cut"), stop_at=stop)
    found = sorted((tmp_path / "cut" / "recordings").glob("*.pt"))
    times = [path.stat().st_mtime_ns for path in found]
    assert len(found) == 8
    again = train(settings(tiny, tmp_path / "cut"))
    assert [path.stat().st_mtime_ns for path in found] == times
    assert again.recall == whole.recall
    assert again.curve == whole.curve
    assert train(settings(tiny, tmp_path / "cut")).resumed_at == 4


def test_trainings_share_recordings_but_not_those_of_other_weights(
    tiny: SimpleNamespace, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    for init in ("random", "key-mean"):
        train(settings(tiny, tmp_path / init, init=init, recordings=str(shared), steps=1))
    assert len(list(shared.glob("*.pt"))) == 8
    own = settings(tiny, tmp_path / "other", recordings=str(shared), steps=1)
    model = load_model(own.model, "float32", "cpu")
    with torch.no_grad():
        next(model.parameters()).add_(0.1)
    asks, processor = check_image_router(own), load_processor(own.model)
    train_and_save_image_router(model, processor, own, asks, lambda *_: None)
    assert len(list(shared.glob("*.pt"))) == 16


def test_the_prompt_is_that_of_the_evaluation(tiny: SimpleNamespace, tmp_path: Path) -> None:
    asks = {ask.name: ask for ask in draw_asks(settings(tiny, tmp_path))}
    want = (
        "What 3?\nA. cat\nB. dog\nAnswer with the option's letter from the given choices directly."
    )
    assert asks["3"].text == want
    drawn = draw_asks(settings(tiny, tmp_path, questions=3))
    assert len(drawn) == 3
    assert [ask.name for ask in drawn] == [ask.name for ask in draw_asks(settings(tiny, tmp_path, questions=3))]  # fmt: skip
    assert len(draw_asks(settings(tiny, tmp_path, questions=0))) == 9


def test_what_cannot_be_trained_is_told_before_weights_are_read(
    tiny: SimpleNamespace, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="without --clip"):
        settings(tiny, tmp_path, init="clip")
    named = settings(tiny, tmp_path, clip=f"open_clip:local-dir:{tiny.clip}").to_public_dict()
    assert named["clip"] == "open_clip:local-dir:clip"
    with pytest.raises(ConfigError, match="init"):
        check_image_router(settings(tiny, tmp_path, init="zero"))
    with pytest.raises(ConfigError, match="layers"):
        check_image_router(settings(tiny, tmp_path, layers=(99,)))
    with pytest.raises(ConfigError, match="data"):
        check_image_router(settings(tiny, tmp_path, data=(str(tmp_path / "none.tsv"),)))
    tiny_models.build("llama").save_pretrained(tmp_path / "text")
    with pytest.raises(UnsupportedModelError, match="sees no images"):
        check_image_router(settings(tiny, tmp_path, model=str(tmp_path / "text")))
