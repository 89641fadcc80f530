"""What each router would have read of recorded passages, and how good that was. Prints nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from oval_adapters.attachment import attach
from oval_adapters.bench.machine import machine, versions
from oval_adapters.bench.recall_intervals import interval, mean_of_kinds
from oval_adapters.bench.recall_routers import Contender, check_routers, contenders
from oval_adapters.bench.recall_selector import SelectorScene, selector_ms
from oval_adapters.bench.recall_values import (
    MEAN,
    LoopRow,
    PasskeyRow,
    RecallReport,
    RecallRow,
    RecallSettings,
)
from oval_adapters.routing import RecordOptions, record
from oval_adapters.texts import Passage, passages
from oval_core.config import check_int
from oval_core.errors import PromptTooLongError
from oval_core.routing import recall
from oval_core.routing.recording import Recording
from oval_core.routing.replay import kept_pages, oracle_selections, replay

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["check_settings", "describe", "measure_recall", "num_ticks", "output_errors"]

Tick = Callable[[str, int], None]
"""Told what runs, and how many replays or forwards are done."""

_MEASURES = (
    "mass_recall", "mass_recall_p10", "mass_recall_excluding_kept", "page_recall", "heavy_page_recall",
    "output_error", "miss_bytes_per_token", "new_bytes_per_token",
)  # fmt: skip
_RECORDING = 10
"""Ticks for recording a passage: it takes as long as about so many replays."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a row of the table is about, the kind of text left out."""

    signal: str
    lead: int
    budget: float
    loop: str


Judged = Mapping[Case, Mapping[str, float]]
"""Of one passage: by case, each measure."""


def silent(label: str, amount: int) -> None:
    """Is told, and says nothing."""


def check_settings(config: PretrainedConfig, settings: RecallSettings) -> None:
    """Raises an error where a model cannot run this, before its weights are read.

    Raises:
        PromptTooLongError: the model has too few positions.
        ConfigError: no such router, or no layer is left to be routed.
    """
    check_routers(settings)
    text = config.get_text_config(decoder=True)
    for layer in settings.dense_layers:
        check_int("dense_layers", layer, 0, text.num_hidden_layers - 1)
    limit = getattr(text, "max_position_embeddings", None)
    asked = settings.context + settings.steps
    if limit is not None and asked > limit:
        raise PromptTooLongError(
            f"context: got {settings.context} and {settings.steps} steps, {asked} tokens. Allowed: {limit}, the "
            "positions of this model. Ask for fewer, or take a model with a longer context."
        )


def measure_recall(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: RecallSettings,
    tick: Tick | None = None,
) -> Iterator[RecallRow]:
    """Records passages of each kind under full attention, replays every router, and yields rows kind by kind.

    Last come rows of the kind `mean`. One recording is held at a time.

    Args:
        model: on the CPU, not attached.
        tokenizer: the model's.
        settings: what to measure.
        tick: called between replays.
    Raises:
        ConfigError: a text is too short, or a router does not fit the model.
    """
    tell = tick or silent
    found = contenders(settings, model)
    by_kind = {kind: held_out_passages(tokenizer, settings, kind) for kind in settings.kinds}
    costs = _costs(model, settings, found)
    judged: dict[str, list[Judged]] = {}
    for kind, texts in by_kind.items():
        judged[kind] = [_judge(model, text, settings, found, tell) for text in texts]
        yield from _rows(kind, [judged[kind]], settings, costs)
    if len(judged) > 1:
        yield from _rows(MEAN, list(judged.values()), settings, costs)


def held_out_passages(
    tokenizer: PreTrainedTokenizerBase, settings: RecallSettings, kind: str
) -> list[Passage]:
    """Returns the passages of a kind, those that no training had facts of."""
    return passages(
        [kind],
        settings.data,
        tokenizer,
        context=settings.context,
        steps=settings.steps,
        count=settings.passages,
        seed=settings.seed,
        split="test",
    )


def num_ticks(model: PreTrainedModel, settings: RecallSettings) -> int:
    """Returns how far `measure_recall` will move a bar."""
    replays = len(settings.budgets) * len(settings.loops)
    leads = sum(len(c.leads(settings.leads)) for c in contenders(settings, model))
    return len(settings.kinds) * settings.passages * (_RECORDING + replays * leads)


def output_errors(recording: Recording, selections: Sequence[torch.Tensor]) -> list[float]:
    """Returns `recall.output_error` of several selections, each partial output read once for all of them."""
    groups = torch.tensor([group for group in recording.group_of_layer if group >= 0])
    stacked = torch.stack(list(selections))  # [S, T, G, P]
    total = torch.zeros(len(stacked))
    for place, step in enumerate(recording.sampled.tolist()):
        parts = recording.part_output[place].float()  # [L, H, P, E]
        mass = recording.part_mass[place]  # [L, H, P]
        read = stacked[:, step, groups].transpose(0, 1).float()  # [L, S, P]
        whole = (parts.sum(2) / mass.sum(2, keepdim=True))[:, None]  # [L, 1, H, E]
        seen = (read @ mass.transpose(1, 2)).clamp(min=torch.finfo(torch.float32).tiny)
        by_page = parts.transpose(1, 2).flatten(2)  # [L, P, H * E]
        sparse = (read @ by_page).unflatten(2, (mass.shape[1], -1)) / seen[..., None]
        total += ((sparse - whole).norm(dim=-1) / whole.norm(dim=-1)).mean((0, 2))
    count = len(recording.sampled)
    return (total / count).tolist() if count else [math.nan] * len(stacked)


def describe(
    name: str,
    model: PreTrainedModel,
    settings: RecallSettings,
    rows: Sequence[RecallRow],
    decode: Sequence[LoopRow],
    passkeys: Sequence[PasskeyRow],
) -> RecallReport:
    """Puts rows and the circumstances of their measurement together."""
    with attach(model) as oval:
        backend = oval.backend
    return RecallReport(
        rows=tuple(rows),
        decode=tuple(decode),
        passkeys=tuple(passkeys),
        model=name,
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        threads=torch.get_num_threads(),
        backend=backend,
        settings=settings,
        versions=versions(),
        machine=machine(model.device),
    )


def _costs(
    model: PreTrainedModel, settings: RecallSettings, found: Sequence[Contender]
) -> dict[str, float]:
    """Returns the selector's milliseconds by signal."""
    routers = {contender.signal: contender.create() for contender in found}
    scene = SelectorScene(
        model.config,
        settings.routing(1.0),
        num_pages=max(1, settings.context // settings.page_size),
        page_size=settings.page_size,
        needs=frozenset().union(*(router.needs for router in routers.values())),
        dtype=model.dtype,
    )
    return {signal: selector_ms(scene, router) for signal, router in routers.items()}


def _judge(
    model: PreTrainedModel,
    passage: Passage,
    settings: RecallSettings,
    found: Sequence[Contender],
    tell: Tick,
) -> Judged:
    """Records a passage and replays every case on it."""
    tell(f"{passage.name}: recording", 0)
    recording = record(
        model,
        passage.prompt_ids,
        passage.continuation_ids,
        kind=passage.kind,
        name=passage.name,
        options=RecordOptions(
            page_size=settings.page_size,
            dense_layers=settings.dense_layers,
            layer_groups=settings.layer_groups,
        ),
    )
    tell(f"{passage.name}: recorded", _RECORDING)
    oracles = {
        budget: oracle_selections(recording, settings.replay(budget, 1, "closed"))
        for budget in settings.budgets
    }
    judged: dict[Case, Mapping[str, float]] = {}
    for contender in found:
        selections: dict[Case, torch.Tensor] = {}
        for case in _cases(contender, settings):
            options = settings.replay(case.budget, max(1, case.lead), case.loop)
            selections[case] = replay(recording, contender.create(), options)
            tell(f"{passage.name}: {contender.signal}", 1)
        errors = output_errors(recording, list(selections.values()))
        for (case, selected), error in zip(selections.items(), errors, strict=True):
            measures = _measures(recording, selected, oracles[case.budget], settings)
            judged[case] = measures | {"output_error": error}
    return judged


def _cases(contender: Contender, settings: RecallSettings) -> list[Case]:
    return [
        Case(contender.signal, lead, budget, loop)
        for loop in settings.loops
        for lead in contender.leads(settings.leads)
        for budget in settings.budgets
    ]


def _measures(
    recording: Recording, selected: torch.Tensor, oracle: torch.Tensor, settings: RecallSettings
) -> dict[str, float]:
    kept = kept_pages(recording, settings.num_sink_tokens, settings.window_size)
    return {
        "mass_recall": recall.mass_recall(recording, selected),
        "mass_recall_p10": recall.mass_recall_p10(recording, selected),
        "mass_recall_excluding_kept": recall.mass_recall_excluding_kept(recording, selected, kept),
        "page_recall": recall.page_recall(recording, selected),
        "heavy_page_recall": recall.heavy_page_recall(recording, selected),
        "miss_bytes_per_token": recall.miss_bytes_per_token(recording, selected, oracle),
        "new_bytes_per_token": recall.new_bytes_per_token(recording, selected),
    }


def _rows(
    kind: str,
    by_kind: Sequence[Sequence[Judged]],
    settings: RecallSettings,
    costs: Mapping[str, float],
) -> Iterator[RecallRow]:
    for case in by_kind[0][0]:
        values = {
            name: [[judged[case][name] for judged in own] for own in by_kind] for name in _MEASURES
        }
        means = {name: mean_of_kinds(own) for name, own in values.items()}
        has_error = not math.isnan(means["output_error"])
        recalls, errors = values["mass_recall"], values["output_error"]
        yield RecallRow(
            signal=case.signal,
            kind=kind,
            lead=case.lead,
            budget=case.budget,
            loop=case.loop,
            **{name: None if math.isnan(mean) else mean for name, mean in means.items()},
            selector_ms=round(costs[case.signal], 4),
            passages=sum(len(own) for own in by_kind),
            mass_recall_interval=interval(recalls, settings.seed),
            output_error_interval=interval(errors, settings.seed) if has_error else None,
            mass_recall_by_passage=tuple(value for own in recalls for value in own),
            output_error_by_passage=tuple(v for own in errors for v in own) if has_error else (),
        )
