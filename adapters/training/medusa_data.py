"""From prompts to what draft heads learn from: the model's own answers, split by prompt, and their draft vocabulary."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from oval_adapters.distill.answers import Answer, answers_of, read_answers
from oval_adapters.distill.prompt_files import Prompt, read_prompts
from oval_adapters.distill.prompts import chat_header, chat_prompt, write_prompts
from oval_adapters.training.medusa_settings import SELF, MedusaTraining
from oval_core.errors import ConfigError
from oval_spec.training.examples import HeadExamples, split_by_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["MedusaData", "check_data", "gather_answers"]

Tick = Callable[[str, int, int], None]
_WRITTEN_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class MedusaData:
    """Answers.

    Attributes:
        train: to learn from.
        held_out: to judge by; no prompt of it is in `train`.
        prompt_tokens: all tokens of the prompts of `train`, int64.
        too_long: prompts that the model has no positions for, left out.
    """

    train: HeadExamples
    held_out: HeadExamples
    prompt_tokens: torch.Tensor
    too_long: int


def check_data(tokenizer: PreTrainedTokenizerBase, settings: MedusaTraining) -> None:
    """Raises `ConfigError` where a source of prompts cannot be read, before a model's weights are."""
    for source in settings.data:
        if source == SELF:
            chat_header(tokenizer)
        elif Path(source).expanduser().is_dir():
            _answer_files(source)
        else:
            read_prompts(source)


def gather_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: MedusaTraining,
    tick: Tick,
) -> MedusaData:
    """Returns the model's answers to all prompts; those in `out/answers` are read back, new ones written there."""
    answers: list[Answer] = []
    kinds: list[str] = []
    too_long = 0
    for source in settings.data:
        if Path(source).expanduser().is_dir():
            for path in _answer_files(source):
                found = list(read_answers(path))
                answers += found
                kinds += [Path(source).name] * len(found)
            continue
        prompts = _prompts(model, tokenizer, settings, source, tick)
        kind_of = {tuple(chat_prompt(tokenizer, own.text)): own.kind for own in prompts}
        fit = [ids for ids in kind_of if _fits(model, len(ids), settings.max_new_tokens)]
        too_long += len(kind_of) - len(fit)
        for answer in answers_of(
            model,
            fit,
            max_new_tokens=settings.max_new_tokens,
            end_ids=_end_ids(model, tokenizer),
            folder=Path(settings.out) / "answers",
            batch_size=settings.answer_batch,
            tick=tick,
        ):
            answers.append(answer)
            kinds.append(kind_of[tuple(answer.prompt.tolist())])
    return _split(answers, kinds, too_long, settings, model)


def _split(
    answers: list[Answer],
    kinds: list[str],
    too_long: int,
    settings: MedusaTraining,
    model: PreTrainedModel,
) -> MedusaData:
    prompts = [answer.prompt.tolist() for answer in answers]
    _check_size(answers, model)
    sides = split_by_prompt(prompts, kinds, settings.held_out, settings.loop.seed)
    if not all(sides):
        raise ConfigError(
            f"data: got {len({tuple(p) for p in prompts})} different prompts that fit. Allowed: two or more of a kind, so "
            "that one can be held out. Give more prompts."
        )
    train, held_out = (
        HeadExamples.join(
            [answers[i].prompt for i in side],
            [answers[i].tokens for i in side],
            [answers[i].hidden for i in side],
            [kinds[i] for i in side],
        )
        for side in sides
    )
    read = torch.cat([answers[i].prompt for i in sides[0]]).long()
    return MedusaData(train, held_out, read, too_long)


def _prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: MedusaTraining,
    source: str,
    tick: Tick,
) -> list[Prompt]:
    if source != SELF:
        return read_prompts(source)[: settings.limit]
    folder = Path(settings.out) / "prompts"
    folder.mkdir(parents=True, exist_ok=True)
    written: list[str] = []
    batches = -(-settings.prompts // _WRITTEN_AT_ONCE)
    for batch in range(batches):
        seed = settings.loop.seed * 100_003 + batch
        made_by = f"{settings.model}-{model.dtype}-{seed}"
        path = folder / f"{hashlib.sha256(made_by.encode()).hexdigest()[:24]}.json"
        if not path.is_file():
            turns = write_prompts(model, tokenizer, _WRITTEN_AT_ONCE, seed)
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(turns), encoding="utf-8")
            partial.replace(path)
        written += json.loads(path.read_text(encoding="utf-8"))
        tick("prompts", batch + 1, batches)
    return [Prompt(text, SELF) for text in written[: settings.prompts]]


def _answer_files(folder: str) -> list[Path]:
    files = sorted(Path(folder).expanduser().glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"data: got the folder {folder}, which has no answers (*.safetensors). Allowed: the folder `answers` of an "
            "earlier training of this model. Name it, or a file with prompts."
        )
    return files


def _check_size(answers: list[Answer], model: PreTrainedModel) -> None:
    size = model.config.get_text_config(decoder=True).hidden_size
    for answer in answers:
        if answer.hidden.shape[1] != size:
            raise ConfigError(
                f"data: got answers with hidden states of {answer.hidden.shape[1]} values. Allowed: {size}, as this model "
                "has. Name a folder of its own answers."
            )


def _fits(model: PreTrainedModel, length: int, new: int) -> bool:
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit is None or length + new <= limit


def _end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the tokens that end an answer as `generate` would have it."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    if ends is None:
        ends = tokenizer.eos_token_id
    if ends is None:
        return []
    return ends if isinstance(ends, list) else [ends]
