"""From captioned pictures to a small LLaVA's weights in a folder: loads, aligns, trains, saves, reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoImageProcessor, AutoModel
from transformers.utils import logging

from oval_adapters.bench.machine import machine, versions
from oval_adapters.load_model import ModelLoadError, load_model, load_tokenizer
from oval_adapters.models import resolve_model
from oval_adapters.models.llava_prompt import IMAGE_TOKEN, with_image_token
from oval_adapters.models.llava_weights import load_llava_weights, save_llava_weights
from oval_adapters.training.llava_align import align_projector, patch_words, word_embeddings
from oval_adapters.training.llava_features import FeatureStore
from oval_adapters.training.llava_loop import LlavaTrainer
from oval_adapters.training.llava_rows import RowMaker
from oval_adapters.training.llava_settings import LlavaTraining
from oval_adapters.training.llava_student import Student, make_projector
from oval_adapters.training.medusa_stop import asked_to_stop
from oval_adapters.training.resumable_loop import Tick, TrainingStopped, write_log
from oval_core.errors import ConfigError
from oval_mm.scenes import COLOURS, Library, draw

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Learner", "LlavaReport", "load_learner", "train_and_save_llava"]

LOG_NAME = "training.jsonl"
FEATURES = "features"
ALIGN_RATE = 2e-3


@dataclass(frozen=True, slots=True)
class Learner:
    """What is trained from.

    Attributes:
        decoder: in bfloat16.
        tokenizer: with the image token.
        tower: in bfloat16.
        image_processor: of the tower.
        library: of the pictures.
    """

    decoder: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    tower: PreTrainedModel
    image_processor: Any
    library: Library


@dataclass(frozen=True, kw_only=True, slots=True)
class LlavaReport:
    """What a training gave.

    Attributes:
        out: folder of the weights.
        stage: `projector` or `llava`.
        known_names: different names that were trained on.
        never_seen_names: those held out.
        updates: in all.
        resumed_at: those of earlier runs.
        minutes: of all runs.
        questions_per_s: of this run, validation not included; 0 where nothing was left to do.
        align: how alignment went, or None.
        curve: one entry a validation, see `measure`.
        file_bytes: of the weights.
        settings: of the training.
        versions: of torch and transformers.
        machine: what ran it.
    """

    out: str
    stage: str
    known_names: int
    never_seen_names: int
    updates: int
    resumed_at: int
    minutes: float
    questions_per_s: float
    align: dict[str, Any] | None
    curve: list[dict[str, Any]]
    file_bytes: int
    settings: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, ready for JSON."""
        return asdict(self)


def load_learner(settings: LlavaTraining) -> Learner:
    """Loads decoder, tower and pictures.

    Raises:
        OvalError: one of them is not there, or does not fit.
    """
    library = Library(settings.pictures, settings.split_seed)
    path = resolve_model(settings.vision)
    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        tower = AutoModel.from_pretrained(path, dtype=torch.bfloat16).eval()
        processor = AutoImageProcessor.from_pretrained(path)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelLoadError(f"cannot load the tower {settings.vision!r}: {error}") from error
    finally:
        if were_on:
            logging.enable_progress_bar()
    if not hasattr(tower.config, "patch_size") or processor.size is None or "height" not in processor.size:  # fmt: skip
        raise ConfigError(
            f"vision: {settings.vision!r} has no patches, or scales to no fixed size. Allowed: dinov2-small, or such a "
            "folder. Name one."
        )
    # with a mask of our own, the backward pass of `sdpa` takes twice as long on a CPU
    decoder = load_model(settings.model, "bfloat16", "cpu", attention="eager")
    tokenizer = with_image_token(load_tokenizer(settings.model))
    return Learner(decoder, tokenizer, tower.requires_grad_(False), processor, library)


def train_and_save_llava(learner: Learner, settings: LlavaTraining, tick: Tick) -> LlavaReport:
    """Trains and writes weights to `settings.out`; goes on from what an earlier run left there.

    Raises:
        TrainingStopped: Ctrl-C came; the same call goes on from there.
        ConfigError: the folder holds another training, or cannot be written.
    """
    folder = Path(settings.out)
    store = FeatureStore(folder / FEATURES, learner.tower, learner.image_processor)
    text = learner.decoder.config
    projector = make_projector(learner.tower.config, text, settings.seed)
    rank = settings.rank if settings.stage == "llava" else 0
    student = Student(learner.decoder, projector, rank, settings.seed)
    image_token = learner.tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    with asked_to_stop() as is_stopping:
        trainer = LlavaTrainer(
            student,
            store,
            learner.library,
            RowMaker(learner.tokenizer, store.tokens),
            image_token,
            settings,
            identity=_identity(settings),
            tick=tick,
            log=lambda curve: write_log(folder / LOG_NAME, curve),
            is_stopping=is_stopping,
        )
        if not trainer.resume():
            if settings.init is not None:
                student.load(load_llava_weights(Path(settings.init)))
                trainer.notes["init"] = Path(settings.init).name
            else:
                told = _stoppable(tick, is_stopping)
                trainer.notes["align"] = _align(trainer, store, learner, settings, told)
            trainer.save()
        trainer.run()
    return _save(trainer, learner, settings)


def _stoppable(tick: Tick, is_stopping: Callable[[], bool]) -> Tick:
    """Returns a tick that raises where a stop was asked for: what was seen is on the disk, the rest takes a minute."""

    def told(label: str, done: int, total: int) -> None:
        tick(label, done, total)
        if is_stopping():
            raise TrainingStopped

    return told


def _align(
    trainer: LlavaTrainer,
    store: FeatureStore,
    learner: Learner,
    settings: LlavaTraining,
    tick: Tick,
) -> dict[str, Any] | None:
    """Gives the projector its first weights; statistics of features are learnt even where it is not aligned."""
    count = min(settings.scenes, max(settings.align_pictures, settings.batch))
    scenes = trainer.lessons.scenes[:count]
    parts = []
    for start in range(0, count, 64):
        pictures = [draw(scene, learner.library) for scene in scenes[start : start + 64]]
        parts.append(store.of(pictures))
        tick("looking at pictures", min(start + 64, count), count)
    features = torch.cat(parts)
    student = trainer.student
    student.learn_statistics(features)
    if not settings.align_pictures or not settings.align_updates:
        return None
    names = [name for name in learner.library.names(False) if name not in COLOURS]
    words = [*names, *COLOURS]
    table = learner.decoder.get_input_embeddings().weight.detach()
    done = align_projector(
        student.projector,
        student.standardise(features).to(torch.bfloat16),
        patch_words(scenes, learner.library, words, store.grid),
        word_embeddings(words, learner.tokenizer, table),
        word_embeddings(("left", "right"), learner.tokenizer, table),
        columns=store.grid[1],
        updates=settings.align_updates,
        rate=ALIGN_RATE,
        seed=settings.seed,
        tick=lambda update: tick("aligning the projector", update, settings.align_updates),
    )
    return {"pictures": count, "words": len(words), **asdict(done)}


def _save(trainer: LlavaTrainer, learner: Learner, settings: LlavaTraining) -> LlavaReport:
    text, vision = learner.decoder.config, learner.tower.config
    base = {
        "model": _name(settings.model),
        "vision": _name(settings.vision),
        "model_type": text.model_type,
        "hidden_size": text.hidden_size,
        "num_layers": text.num_hidden_layers,
        "vocab_size": text.vocab_size,
        "vision_hidden_size": vision.hidden_size,
    }
    training = {
        "settings": _public(settings),
        "sources": list(settings.sources) or [_name(folder) for folder in settings.pictures],
        "known_names": len(learner.library.names(False)),
        "never_seen_names": len(learner.library.names(True)),
        "updates": trainer.done,
        "minutes": round(trainer.seconds / 60, 2),
        "align": trainer.notes.get("align"),
        "curve": trainer.curve,
        "versions": versions(),
        "machine": machine(learner.decoder.device),
    }
    side = learner.image_processor.size["height"]
    size = save_llava_weights(Path(settings.out), trainer.student.weights(side, base, training))
    return LlavaReport(
        out=settings.out,
        stage=settings.stage,
        known_names=training["known_names"],
        never_seen_names=training["never_seen_names"],
        updates=trainer.done,
        resumed_at=trainer.resumed_at,
        minutes=training["minutes"],
        questions_per_s=trainer.samples / trainer.learning_s if trainer.learning_s else 0.0,
        align=training["align"],
        curve=trainer.curve,
        file_bytes=size,
        settings=training["settings"],
        versions=training["versions"],
        machine=training["machine"],
    )


def _identity(settings: LlavaTraining) -> dict[str, Any]:
    """Returns what a checkpoint depends on; more time, and other intervals, change no lesson of the past."""
    values = json.loads(json.dumps(settings.to_dict()))
    for name in ("out", "validate_every", "save_every", "validation", "sources"):
        del values[name]
    return values  # type: ignore[no-any-return]


def _public(settings: LlavaTraining) -> dict[str, Any]:
    """Returns the settings without the places of this machine."""
    values = settings.to_dict()
    del values["out"]
    values |= {"model": _name(settings.model), "vision": _name(settings.vision)}
    values["pictures"] = [_name(folder) for folder in settings.pictures]
    if settings.init is not None:
        values["init"] = _name(settings.init)
    return values


def _name(text: str) -> str:
    return Path(text).name if Path(text).exists() else text
