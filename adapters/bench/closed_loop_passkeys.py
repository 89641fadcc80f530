"""Whether a model finds a code in a text when it reads only what a router chooses. Prints nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch

from oval_adapters.bench.closed_loop_prefill import FULL, Prefilled, Run, forward, runs
from oval_adapters.bench.recall import Tick, silent
from oval_adapters.bench.recall_routers import contenders
from oval_adapters.bench.recall_values import DEPTHS, FLAVOURS, PasskeyRow, RecallSettings
from oval_adapters.texts import PasskeyCase, grade, passkey_cases, read_source
from oval_core.errors import PromptTooLongError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from oval_adapters.hf_cache import OvalCache
    from oval_adapters.texts.passkey import Flavour

__all__ = ["check_passkeys", "make_cases", "measure_passkeys", "num_passkey_ticks"]

_ANSWER = 8
"""Tokens of an answer."""

_LATER_ROOM = 96
"""Tokens that a first answer and a second question take at most."""


def check_passkeys(config: PretrainedConfig, settings: RecallSettings) -> None:
    """Raises `PromptTooLongError` where the model has too few positions."""
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    room = _LATER_ROOM + _ANSWER
    longest = max(settings.passkey_contexts, default=0)
    if settings.decode and settings.passkeys and limit is not None and longest + room > limit:
        raise PromptTooLongError(
            f"passkey-context: got {longest}. Allowed: {limit - room}, the positions of this model less {room} for "
            "questions and answers. Ask for fewer, or pass --passkeys 0."
        )


def measure_passkeys(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: RecallSettings,
    tick: Tick | None = None,
) -> Iterator[PasskeyRow]:
    """Asks about codes in the first file's text, greedily, under every policy; yields rows length by length.

    The first answer of a later turn is forced token by token, and the question after it is one forward, as a user's
    turn is: long ones are read whole.

    Args:
        model: not attached.
        tokenizer: the model's.
        settings: what to measure.
        tick: called after each batch of answers.
    Raises:
        ConfigError: the text is too short, or a router does not fit the model.
    """
    tell = tick or silent
    wanted = runs(contenders(settings, model), settings)
    for (flavour, context), cases in make_cases(tokenizer, settings).items():
        right: dict[Run, list[bool]] = {run: [] for run in wanted}
        for batch in _batches(cases):
            _ask(model, tokenizer, batch, settings, right, tell)
        yield from _rows(flavour, context, right)


def make_cases(
    tokenizer: PreTrainedTokenizerBase, settings: RecallSettings
) -> dict[tuple[str, int], list[PasskeyCase]]:
    """Returns the cases of each flavour and length, from the first file's text.

    Raises:
        ConfigError: the text is too short, or a context too small.
    """
    if not settings.passkeys:
        return {}
    text = read_source(settings.data[0]).text
    return {
        (flavour, context): passkey_cases(
            text,
            tokenizer,
            context=context,
            depths=DEPTHS,
            count=settings.passkeys,
            seed=settings.seed,
            flavour=cast("Flavour", flavour),
        )
        for flavour in FLAVOURS
        for context in settings.passkey_contexts
    }


def num_passkey_ticks(model: PreTrainedModel, settings: RecallSettings) -> int:
    """Returns how far `measure_passkeys` will move a bar: by one a case and policy."""
    count = len(runs(contenders(settings, model), settings))
    return count * settings.passkeys * len(FLAVOURS) * len(settings.passkey_contexts)


def _batches(cases: Sequence[PasskeyCase]) -> list[list[PasskeyCase]]:
    """Returns cases that can run side by side: later turns of equal length."""
    found: dict[tuple[int, ...], list[PasskeyCase]] = {}
    for case in cases:
        later = case.later
        shape = () if later is None else (len(case.first.answer_ids), len(later.ids))
        found.setdefault(shape, []).append(case)
    return list(found.values())


def _ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cases: Sequence[PasskeyCase],
    settings: RecallSettings,
    right: dict[Run, list[bool]],
    tell: Tick,
) -> None:
    """Adds the grades of these cases to each run's."""
    prompt = torch.stack([case.prompt_ids for case in cases]).to(model.device)
    label = f"passkeys, {prompt.shape[1]} tokens"
    tell(f"{label}: reading", 0)
    room = _LATER_ROOM + _ANSWER
    with Prefilled.of(model, prompt, list(right), settings, room) as prefilled:
        for run, grades in right.items():
            with prefilled.copy(run, settings) as (cache, _):
                logits = _later_turn(model, cache, cases, prefilled.logits)
                answers = _generate(model, cache, logits)
            texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
            grades += [grade(text, case.code) for text, case in zip(texts, cases, strict=True)]
            tell(f"{label}: {run.label}", len(cases))


def _later_turn(
    model: PreTrainedModel, cache: OvalCache, cases: Sequence[PasskeyCase], logits: torch.Tensor
) -> torch.Tensor:
    """Returns the logits [B, V] after the last question."""
    questions = [case.later for case in cases if case.later is not None]
    if not questions:
        return logits
    answers = torch.stack([case.first.answer_ids for case in cases]).to(model.device)
    for token in answers.split(1, dim=1):
        forward(model, cache, token)
    return forward(model, cache, torch.stack([q.ids for q in questions]).to(model.device))


def _generate(model: PreTrainedModel, cache: OvalCache, logits: torch.Tensor) -> torch.Tensor:
    """Returns greedy tokens [B, 8]."""
    tokens = [logits.argmax(-1, keepdim=True)]
    while len(tokens) < _ANSWER:
        tokens.append(forward(model, cache, tokens[-1]).argmax(-1, keepdim=True))
    return torch.cat(tokens, dim=1)


def _rows(flavour: str, context: int, right: dict[Run, list[bool]]) -> Iterator[PasskeyRow]:
    full = next(grades for run, grades in right.items() if run.policy == FULL)
    for run, grades in right.items():
        yield PasskeyRow(
            signal=run.signal,
            policy=run.policy,
            flavour=flavour,
            context=context,
            lead=run.lead,
            budget=run.budget,
            correct=sum(grades),
            cases=len(grades),
            full_correct=sum(full),
            correct_where_full_is=sum(a and b for a, b in zip(grades, full, strict=True)),
        )
