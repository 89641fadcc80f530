"""Records one passage under several page sizes in one run of the model. Leaves the model as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

from oval_adapters.routing.observer import Observer
from oval_adapters.routing.observer import Passage as PassagePages
from oval_adapters.routing.recorder import (
    RecordOptions,
    finish_recording,
    listening,
    passage_of,
    pieces_of,
    signals_of,
)
from oval_core.routing.recording import Recording

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from oval_adapters.texts import Passage

__all__ = ["TokenRecording", "record_sizes", "record_tokens"]


class _ManyPages(Observer):
    """Hands the weights to observers of the same passage in other pages; what does not depend on pages is its own."""

    def __init__(self, passage: PassagePages, others: Sequence[Observer]) -> None:
        super().__init__(passage)
        self._others = others
        for other in others:  # by token, not by page: seen once, read by all
            other.token_sum = self.token_sum
            other._received, other._queries = self._received, self._queries

    def _observe(
        self, layer: int, weights: torch.Tensor, values: torch.Tensor, output: torch.Tensor
    ) -> None:
        super()._observe(layer, weights, values, output)
        for other in self._others:
            other._observe(layer, weights, values, output)


@torch.no_grad()
def record_sizes(
    model: PreTrainedModel, passage: Passage, options: Sequence[RecordOptions]
) -> list[Recording]:
    """Returns `record` of a passage under each of the options.

    Args:
        model: as `record` takes it.
        passage: the text.
        options: pages and signals; dense layers and groups are the same in all. `cross_layer` is no signal here.
    """
    decoder = model.get_decoder()
    made = [
        passage_of(decoder.config, len(passage.prompt_ids), len(passage.continuation_ids), own)
        for own in options
    ]
    others = [Observer(pages) for pages in made[1:]]
    observer = _ManyPages(made[0], others)
    hidden, cache = _run(decoder, observer, passage, made[0])
    first = cache.layers[made[0].routed[0]]
    token_bytes = sum(
        k.shape[1] * k.shape[3] * k.element_size() for k in (first.keys, first.values)
    )
    facts = {"kind": passage.kind, "name": passage.name, "token_bytes": token_bytes}
    return [
        finish_recording(seen, pages, hidden, signals_of(seen, own.signals, cache, decoder), facts)
        for seen, pages, own in zip((observer, *others), made, options, strict=True)
    ]


class TokenRecording:
    """What the tokens of a prompt are, and what the steps after it made of them.

    Attributes:
        hidden: [T, C] last hidden states.
        attention: [S, T] mass that each token received in each step, mean over routed layers and heads.
    """

    def __init__(self, hidden: torch.Tensor, attention: torch.Tensor) -> None:
        self.hidden = hidden
        self.attention = attention


class _TokenObserver(Observer):
    """Adds up by token, over the steps."""

    def __init__(self, passage: PassagePages) -> None:
        super().__init__(passage)
        self.attention = torch.zeros(passage.num_steps, passage.context)

    def _receive(self, layer: int, group: int, weights: torch.Tensor, first: int) -> None:
        context = self._passage.context
        if first >= context:
            rows = slice(first - context, first - context + weights.shape[1])
            share = weights[:, :, :context].mean(0) / len(self._passage.routed)
            self.attention[rows] += share

    def _observe(self, *_: object) -> None:
        """Nothing is summed up by page."""


@torch.no_grad()
def record_tokens(
    model: PreTrainedModel, passage: Passage, options: RecordOptions | None = None
) -> TokenRecording:
    """Returns the hidden states of a prompt and the attention that its tokens received in the steps after it."""
    options = replace(options or RecordOptions(), page_size=32, page_sizes=(), output_every=0)
    decoder = model.get_decoder()
    context, steps = len(passage.prompt_ids), len(passage.continuation_ids)
    pages = passage_of(decoder.config, context, steps, options)
    observer = _TokenObserver(pages)
    hidden, _ = _run(decoder, observer, passage, pages)
    return TokenRecording(hidden[:context].clone(), observer.attention)


def _run(
    decoder: torch.nn.Module, observer: Observer, passage: Passage, pages: PassagePages
) -> tuple[torch.Tensor, DynamicCache]:
    """Runs the passage; returns its last hidden states and the model's cache."""
    ids = torch.cat((passage.prompt_ids, passage.continuation_ids))
    cache, hidden = DynamicCache(config=decoder.config), []
    with listening(decoder, observer, ahead=False):
        for start, end in pieces_of(pages):
            done = decoder(input_ids=ids[None, start:end], cache=cache, use_cache=True)
            hidden.append(done.last_hidden_state[0].float())
    return torch.cat(hidden), cache
