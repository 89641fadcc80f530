"""From texts to a trained page sizer beside a trained router: records, trains, saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oval_adapters.bench.machine import machine, versions
from oval_adapters.routing.record_many import TokenRecording, record_tokens
from oval_adapters.routing.recorder import RecordOptions
from oval_adapters.routing.resolve import model_facts
from oval_adapters.texts import passages
from oval_adapters.training.sizer_loop import Progress, train_sizer
from oval_adapters.training.sizer_settings import SizerTraining
from oval_adapters.training.train_run import check_passages
from oval_core.errors import ConfigError
from oval_core.routing.checkpoint import TrainedRouter, load_router, save_router

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["SizerReport", "check_sizer_training", "train_and_save_sizer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SizerReport:
    """What a training gave; see `SizerResult.curve`. A loss of None: nothing was trained yet."""

    out: str
    updates: int
    curve: tuple[Mapping[str, float | None], ...]
    best: Mapping[str, float | None]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, ready for JSON."""
        return asdict(self)


def check_sizer_training(config: PretrainedConfig, settings: SizerTraining) -> TrainedRouter:
    """Returns the router that the sizer goes beside; raises an error where this cannot be trained.

    Raises:
        PromptTooLongError: the model has too few positions.
        ConfigError: there is no router of this model in the folder, or a setting or file is wrong.
    """
    check_passages(config, settings)
    trained = load_router(settings.out)
    if trained.model not in (None, model_facts(config)):
        raise ConfigError(
            f"out: the router in {settings.out} was trained for {trained.model}. Allowed: one of this model, "
            f"{model_facts(config)}. Name its folder, or train it with `oval train router`."
        )
    return trained


def train_and_save_sizer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: SizerTraining,
    progress: Progress,
) -> SizerReport:
    """Trains a sizer for a model and writes it beside the router in `settings.out`, in place of an earlier one."""
    trained = check_sizer_training(model.config, settings)
    recordings = _record(model, tokenizer, settings, progress)
    held_out = recordings[::4]  # of each kind: kinds follow one another
    train = [own for i, own in enumerate(recordings) if i % 4]
    result = train_sizer(train, held_out, settings, progress)
    curve = tuple({n: None if v != v else v for n, v in entry.items()} for entry in result.curve)
    facts = {
        "settings": _public(settings),
        "curve": curve,
        "versions": versions(),
        "machine": machine(model.device),
    }
    training = {**trained.training, "sizer": facts}
    save_router(settings.out, replace(trained, sizer=result.sizer, training=training))
    best = min(curve, key=lambda entry: entry["sizer"] or 0.0)
    return SizerReport(out=settings.out, updates=settings.updates, curve=curve, best=best)


def _record(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: SizerTraining,
    progress: Progress,
) -> list[TokenRecording]:
    made = passages(
        settings.kinds,
        settings.data,
        tokenizer,
        context=settings.context,
        steps=settings.steps,
        count=settings.passages,
        seed=settings.seed,
        split="train",
    )
    options = RecordOptions(dense_layers=settings.dense_layers)
    found = []
    for i, passage in enumerate(made):
        found.append(record_tokens(model, passage, options))
        progress("recording", i + 1, len(made))
    return found


def _public(settings: SizerTraining) -> dict[str, Any]:
    """Returns the settings without the places of this machine."""
    values = settings.to_dict()
    del values["out"]
    if Path(settings.model).exists():
        values["model"] = Path(settings.model).name
    return values | {"data": [Path(path).name for path in settings.data]}
