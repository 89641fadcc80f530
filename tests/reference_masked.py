"""What a selection computes, by Hugging Face alone: eager attention under masks that leave out the pages nobody read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tiny_models import run
from transformers import DynamicCache, PreTrainedModel

from oval_adapters import attach
from oval_core.routing.routed import RoutedPolicy


@dataclass
class Forwards:
    """The forwards of one call of `generate`.

    Attributes:
        mask: [B, prompt] of the prompt, 1 where there is no padding.
        ids: new tokens [B, T] of each forward.
        starts: columns before each.
        read: by forward, by layer, by row: columns that were read.
        logits: [B, logits, V] of each.
    """

    mask: torch.Tensor
    ids: list[torch.Tensor] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    read: list[dict[int, list[set[int]]]] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_left_out(self) -> int:
        """Columns that were not read, over forwards, routed layers and rows."""
        ends = [start + ids.shape[1] for start, ids in zip(self.starts, self.ids, strict=True)]
        return sum(
            int(self.mask_of(end)[row].sum()) - len(columns)
            for end, layers in zip(ends, self.read, strict=True)
            for rows in layers.values()
            for row, columns in enumerate(rows)
        )

    @property
    def num_cut(self) -> int:
        """Columns that were taken back."""
        ends = [start + ids.shape[1] for start, ids in zip(self.starts, self.ids, strict=True)]
        return sum(end - start for end, start in zip(ends, self.starts[1:], strict=False))

    def mask_of(self, length: int) -> torch.Tensor:
        """Returns the mask [B, length] of a longer text."""
        more = self.mask.new_ones(len(self.mask), max(0, length - self.mask.shape[1]))
        return torch.cat([self.mask, more], 1)[:, :length]


def recorded(model: PreTrainedModel, config: Any, call: dict[str, Any]) -> Forwards:
    """Generates on OVAL, and notes what each forward brought, read and gave."""
    ids = call.get("inputs", call.get("input_ids"))
    found = Forwards(call.get("attention_mask", torch.ones_like(ids)))
    with attach(model, config) as oval, pytest.MonkeyPatch.context() as patch:
        cache = oval.new_cache()
        real = RoutedPolicy.saw

        def saw(self: RoutedPolicy, layer: int, row: int, *args: Any) -> None:
            real(self, layer, row, *args)
            plan, seq = args[2], cache.paged.table.sequences[row]
            places = found.mask_of(seq.length + found.mask.shape[1])[row].nonzero()[:, 0].tolist()
            pages = {page_id for page_id, _ in plan.pages}
            rows = found.read[-1].setdefault(layer, [set() for _ in found.mask])
            rows[row] |= {places[t] for p in seq.pages if p.page_id in pages for t in p.tokens}

        def began(_: Any, args: tuple[torch.Tensor, ...]) -> None:
            found.ids.append(args[0].clone())
            found.starts.append(cache.get_seq_length())
            found.read.append({})

        patch.setattr(RoutedPolicy, "saw", saw)
        hooks = [
            model.get_input_embeddings().register_forward_pre_hook(began),
            model.register_forward_hook(lambda *a: found.logits.append(a[2].logits.clone())),
        ]
        try:
            run(model, **call, cache=cache)
        finally:
            for hook in hooks:
                hook.remove()
    return found


@torch.no_grad()
def replayed(model: PreTrainedModel, forwards: Forwards) -> Iterator[torch.Tensor]:
    """Yields the logits of each forward, computed with a `DynamicCache` and one mask a layer."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    cache = DynamicCache()  # without windows: masks alone say what is seen, and a cut can be made
    for ids, start, read, logits in zip(
        forwards.ids, forwards.starts, forwards.read, forwards.logits, strict=True
    ):
        if cache.get_seq_length() > start:
            cache.crop(start - cache.get_seq_length())
        end = start + ids.shape[1]
        mask = forwards.mask_of(end)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, start:]
        with _masks(model, read, mask, start):
            out = model(
                ids, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True
            )
        yield out.logits[:, -logits.shape[1] :]
    model.set_attn_implementation(before)


@contextlib.contextmanager
def _masks(
    model: PreTrainedModel, read: dict[int, list[set[int]]], mask: torch.Tensor, start: int
) -> Iterator[None]:
    """Gives each layer that was watched a causal mask without the columns that it did not read."""
    end = mask.shape[1]
    causal = torch.arange(end) <= torch.arange(start, end)[:, None]
    hooks = []
    for layer, rows in read.items():
        open_ = torch.zeros(len(rows), end, dtype=torch.bool)
        for row, columns in enumerate(rows):
            open_[row, sorted(columns)] = True
        seen = open_[:, None, None] & causal  # [B, 1, T, L]
        bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)

        def change(_: Any, args: Any, kwargs: Any, bias: torch.Tensor = bias) -> Any:
            return args, {**kwargs, "attention_mask": bias}

        attention = model.get_decoder().layers[layer].self_attn
        hooks.append(attention.register_forward_pre_hook(change, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
