"""From prompts to draft heads in a folder: answers, trains, measures, saves."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from oval_adapters.bench.machine import machine, versions
from oval_adapters.models.resolve import served_name
from oval_adapters.training.medusa_data import MedusaData, check_data, gather_answers
from oval_adapters.training.medusa_settings import MedusaTraining
from oval_adapters.training.medusa_stop import asked_to_stop
from oval_core.errors import ConfigError
from oval_spec.heads import BaseFacts, DraftHeads, DraftVocabulary, create_heads
from oval_spec.heads.facts import BaseWeights
from oval_spec.layouts import save_heads, write_tgi, write_vllm
from oval_spec.layouts.own import CONFIG_NAME, WEIGHTS_NAME
from oval_spec.training.examples import CONTEXT, frequent_tokens
from oval_spec.training.loop import HeadTrainer, TrainedHeads
from oval_spec.training.measure import tau_of_kinds

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["MedusaReport", "check_medusa_training", "train_and_save_medusa"]

LOG_NAME = "training.jsonl"
TREE_NODES = 32
"""Nodes, the root included, of the trees that the report judges by."""

Tick = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaReport:
    """What a training gave.

    Attributes:
        out: the heads' folder.
        kind: of the heads.
        positions: that were learnt from in each epoch.
        held_out_positions: that the figures are of.
        too_long: prompts that were left out.
        draft_tokens: size of the draft vocabulary.
        unseen_draft_tokens: those that neither answers nor prompts had, which fill it up: the lowest ids.
        coverage: share of held-out tokens that the draft vocabulary has.
        file_bytes: of the saved weights.
        updates: in all.
        resumed_at: those done in an earlier run.
        positions_per_s: of this run.
        curve: one entry a validation, see `Measured`.
        tau_by_kind: tokens a step with trees of `TREE_NODES` nodes that grow by probability, by sort of prompt.
        layouts: other layouts that were written, each with its folder.
        model: as the user named it.
        dtype: of the model.
        versions: of torch and transformers.
        machine: what ran it.
    """

    out: str
    kind: str
    positions: int
    held_out_positions: int
    too_long: int
    draft_tokens: int
    unseen_draft_tokens: int
    coverage: float
    file_bytes: int
    updates: int
    resumed_at: int
    positions_per_s: float
    curve: tuple[dict[str, Any], ...]
    tau_by_kind: dict[str, float]
    layouts: dict[str, str]
    model: str
    dtype: str
    versions: dict[str, str]
    machine: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, ready for JSON."""
        return asdict(self)


def check_medusa_training(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, settings: MedusaTraining
) -> None:
    """Raises `ConfigError` where this cannot be trained, before a model's weights are read."""
    text = config.get_text_config(decoder=True)
    if settings.vocabulary > text.vocab_size:
        raise ConfigError(
            f"vocabulary: got {settings.vocabulary}. Allowed: up to {text.vocab_size}, the model's tokens, or 0 for all. "
            "Lower it."
        )
    if settings.context > CONTEXT:
        raise ConfigError(f"context: got {settings.context}. Allowed: up to {CONTEXT}. Lower it.")
    create_heads(*settings.head_settings(text.hidden_size))
    check_data(tokenizer, settings)
    try:
        Path(settings.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"out: cannot make the folder {settings.out}: {error.strerror}. Allowed: a folder. Name another one."
        ) from error
    _check_finished(settings)


def _check_finished(settings: MedusaTraining) -> None:
    """Heads that are done are not written over by those of other settings."""
    path = Path(settings.out) / CONFIG_NAME
    try:
        made = json.loads(path.read_text(encoding="utf-8"))["training"]["settings"]
    except (OSError, ValueError, KeyError, TypeError):  # none, or not of a training
        return
    asked = json.loads(json.dumps(_public(settings)))
    for values in (made, asked):  # these change nothing of what is learnt
        values["loop"] = {n: v for n, v in values["loop"].items() if not n.endswith("_every")}
        values["layouts"] = None
    changed = sorted(name for name in asked if made.get(name) != asked[name])
    if changed:
        raise ConfigError(
            f"out: {settings.out} holds heads that were trained with other settings ({', '.join(changed)}). Allowed: the "
            "same settings, or a folder without heads. Name another folder, or delete this one."
        )


def train_and_save_medusa(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: MedusaTraining,
    tick: Tick,
) -> MedusaReport:
    """Trains draft heads for a model and writes them to `settings.out`; goes on from what an earlier run left there.

    Raises:
        TrainingStopped: Ctrl-C came; the same call goes on from there.
    """
    data = gather_answers(model, tokenizer, settings, tick)
    torch.manual_seed(settings.loop.seed)
    base = _base_weights(model)
    heads, unseen = _create(settings, data, base)
    folder = Path(settings.out)
    with asked_to_stop() as is_stopping:
        trainer = HeadTrainer(
            heads,
            base,
            data.train,
            data.held_out,
            settings.loop,
            folder=folder,
            identity={"settings": _identity(settings)},
            tick=tick,
            log=lambda curve: _write_log(folder / LOG_NAME, curve),
            is_stopping=is_stopping,
        )
        trained = trainer.run()
    trained.heads.to(torch.bfloat16)  # as they are saved and served
    tau = tau_of_kinds(trainer.held_out, TREE_NODES, tick)
    return _save(model, settings, data, trained, trainer, tau, unseen)


def _create(
    settings: MedusaTraining, data: MedusaData, base: BaseWeights
) -> tuple[DraftHeads, int]:
    vocab_size, hidden_size = base.lm_head_weight.shape
    vocabulary, unseen = None, 0
    if settings.vocabulary:
        ids, unseen = frequent_tokens(
            data.train.tokens, settings.vocabulary, vocab_size, data.prompt_tokens
        )
        vocabulary = DraftVocabulary(ids, vocab_size)
    kind, values = settings.head_settings(hidden_size)
    heads = create_heads(kind, values, vocabulary).to(base.lm_head_weight.device)
    heads.bind(base.embed_weight, base.lm_head_weight, base.lm_head_bias)
    return heads, unseen


def _save(
    model: PreTrainedModel,
    settings: MedusaTraining,
    data: MedusaData,
    trained: TrainedHeads,
    trainer: HeadTrainer,
    tau: dict[str, float],
    unseen: int,
) -> MedusaReport:
    heads, folder = trained.heads, Path(settings.out)
    facts = _facts(model)
    heads.accuracy = [list(row) for row in trained.curve[-1]["accuracy"]]
    known = None if heads.vocabulary is None else heads.vocabulary.token_ids
    covered = (
        1.0 if known is None else float(torch.isin(data.held_out.tokens, known).float().mean())
    )
    training = {
        "settings": _public(settings),
        "positions": len(data.train),
        "held_out_positions": len(data.held_out),
        "coverage": covered,
        "curve": trained.curve,
        "tau_by_kind": tau,
        "tree_nodes": TREE_NODES,
        "versions": versions(),
        "machine": machine(model.device),
    }
    save_heads(folder, heads, facts, training=training)
    return MedusaReport(
        out=settings.out,
        kind=settings.kind,
        positions=len(data.train),
        held_out_positions=len(data.held_out),
        too_long=data.too_long,
        draft_tokens=facts.vocab_size if known is None else len(known),
        unseen_draft_tokens=unseen,
        coverage=covered,
        file_bytes=(folder / WEIGHTS_NAME).stat().st_size,
        updates=trainer.updates,
        resumed_at=trained.resumed_at,
        positions_per_s=trained.positions_per_s,
        curve=tuple(trained.curve),
        tau_by_kind=tau,
        layouts=_write_layouts(settings, heads, facts),
        model=settings.model,
        dtype=str(model.dtype).removeprefix("torch."),
        versions=training["versions"],
        machine=training["machine"],
    )


def _write_layouts(settings: MedusaTraining, heads: DraftHeads, facts: BaseFacts) -> dict[str, str]:
    written = {}
    for layout in settings.layouts:
        folder = Path(settings.out) / f"layout-{layout}"
        if layout == "C":
            write_tgi(folder, heads, facts, base_name=served_name(settings.model))
        else:
            write_vllm(folder, heads, facts)
        written[layout] = str(folder)
    return written


def _base_weights(model: PreTrainedModel) -> BaseWeights:
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embed, torch.nn.Embedding), "a decoder has them"
    bias = getattr(head, "bias", None)
    return BaseWeights(
        embed.weight.detach(), head.weight.detach(), None if bias is None else bias.detach()
    )


def _facts(model: PreTrainedModel) -> BaseFacts:
    text = model.config.get_text_config(decoder=True)
    rows = len(model.get_output_embeddings().weight)
    return BaseFacts(model_type=text.model_type, hidden_size=text.hidden_size, vocab_size=rows)


def _write_log(path: Path, curve: Sequence[dict[str, Any]]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(entry) + "\n" for entry in curve), encoding="utf-8")
    partial.replace(path)


def _identity(settings: MedusaTraining) -> dict[str, Any]:
    """Returns what a checkpoint depends on, and its loop stands elsewhere: the place of the folder does not count."""
    values = json.loads(json.dumps(settings.to_dict()))
    del values["out"], values["loop"], values["layouts"]
    return values  # type: ignore[no-any-return]


def _public(settings: MedusaTraining) -> dict[str, Any]:
    """Returns the settings without the places of this machine."""
    values = settings.to_dict()
    del values["out"]
    if Path(settings.model).exists():
        values["model"] = Path(settings.model).name
    return values | {"data": [Path(source).name for source in settings.data]}
