"""Trained routers on disk: what is written is read, and what is not whole says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oval_core.errors import ConfigError
from oval_core.routing.checkpoint import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    ModelFacts,
    TrainedRouter,
    load_router,
    save_router,
)
from oval_core.routing.output_aware import OutputAwareRouter, RouterConfig
from oval_core.routing.registry import create_router

FACTS = ModelFacts(model_type="llama", hidden_size=6, num_layers=4, num_kv_heads=2, vocab_size=100)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = RouterConfig(hidden_size=6, num_groups=2, embedding_size=5, mlp_size=7)
    router = OutputAwareRouter(config)
    with torch.no_grad():
        for weight in router.parameters():
            weight.add_(torch.randn_like(weight))
    trained = TrainedRouter(router=router, model=FACTS, training={"seed": 3})
    save_router(tmp_path / "router", trained)
    return tmp_path / "router"


@pytest.mark.parametrize("model", [FACTS, None])
def test_what_is_saved_is_loaded(tmp_path: Path, model: ModelFacts | None) -> None:
    config = RouterConfig(hidden_size=6, head="absolute", num_pages=9, signals=(), lora_rank=0)
    router = OutputAwareRouter(config)
    save_router(tmp_path, TrainedRouter(router=router, model=model, training={"loss": 0.5}))
    loaded = load_router(tmp_path)
    assert loaded.router.config == config
    assert loaded.model == model
    assert loaded.training == {"loss": 0.5}
    assert not loaded.router.training
    state = loaded.router.state_dict()
    assert state.keys() == router.state_dict().keys()
    assert all(torch.equal(state[name], own) for name, own in router.state_dict().items())


def test_a_folder_is_a_router_by_name(folder: Path) -> None:
    router = create_router(str(folder))
    assert isinstance(router, OutputAwareRouter)
    assert router.config.num_groups == 2


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / CONFIG_NAME
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    state = load_file(folder / WEIGHTS_NAME)
    change(state)
    save_file(state, folder / WEIGHTS_NAME)


def cut(path: Path, share: float) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])


FAULTS: dict[str, Callable[[Path], Any]] = {
    "no config": lambda f: (f / CONFIG_NAME).unlink(),
    "config is no json": lambda f: (f / CONFIG_NAME).write_text("{"),
    "config is a list": lambda f: (f / CONFIG_NAME).write_text("[1]"),
    "config is not text": lambda f: (f / CONFIG_NAME).write_bytes(b"\xff\xfe\x00"),
    "other format": lambda f: edit_config(f, lambda v: v.update(format="oval-router-0")),
    "no format": lambda f: edit_config(f, lambda v: v.pop("format")),
    "no router": lambda f: edit_config(f, lambda v: v.pop("router")),
    "router is no mapping": lambda f: edit_config(f, lambda v: v.update(router=[1])),
    "unknown key": lambda f: edit_config(f, lambda v: v["router"].update(depth=3)),
    "size is missing": lambda f: edit_config(f, lambda v: v["router"].pop("hidden_size")),
    "size is text": lambda f: edit_config(f, lambda v: v["router"].update(hidden_size="6")),
    "unknown head": lambda f: edit_config(f, lambda v: v["router"].update(head="deep")),
    "unknown signal": lambda f: edit_config(f, lambda v: v["router"].update(signals=["luck"])),
    "signals are a number": lambda f: edit_config(f, lambda v: v["router"].update(signals=5)),
    "alpha is text": lambda f: edit_config(f, lambda v: v["router"].update(lora_alpha="8")),
    "model has other facts": lambda f: edit_config(f, lambda v: v["model"].update(depth=3)),
    "model lacks a fact": lambda f: edit_config(f, lambda v: v["model"].pop("vocab_size")),
    "model is a number": lambda f: edit_config(f, lambda v: v.update(model=3)),
    "no weights": lambda f: (f / WEIGHTS_NAME).unlink(),
    "weights are cut": lambda f: cut(f / WEIGHTS_NAME, 0.7),
    "weights are cut in the header": lambda f: cut(f / WEIGHTS_NAME, 0.01),
    "weights are empty": lambda f: (f / WEIGHTS_NAME).write_bytes(b""),
    "weights of other shape": lambda f: edit_config(f, lambda v: v["router"].update(mlp_size=8)),
    "one weight is gone": lambda f: edit_weights(f, lambda s: s.pop("log_temperature")),
    "one weight too many": lambda f: edit_weights(f, lambda s: s.update(more=torch.ones(1))),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_what_is_not_whole_says_so(folder: Path, fault: str) -> None:
    FAULTS[fault](folder)
    with pytest.raises(ConfigError, match=r"Allowed: .*\. [A-Z]"):
        load_router(folder)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        create_router(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="freekv"):
        create_router("freekw")
